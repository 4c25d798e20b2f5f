"""What this machine says: free bytes, measured peaks, and the ranks that train together.  Plans and compiles nothing."""
