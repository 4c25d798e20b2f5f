"""What this machine says: free bytes and measured peaks.  Plans and compiles nothing."""
