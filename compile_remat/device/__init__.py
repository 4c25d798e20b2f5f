"""Reads this machine's memory: free bytes and measured peaks.  Plans and compiles nothing."""
