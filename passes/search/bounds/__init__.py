"""What no plan can beat: times within a budget, and the lowest peak.  Nothing here searches for plans."""
