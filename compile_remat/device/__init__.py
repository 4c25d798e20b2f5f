"""What this machine's memory says: free bytes, measured peaks and step times.  Plans nothing and compiles nothing."""
