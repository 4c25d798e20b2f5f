"""Lower bounds for all plans: on the time within a budget, and on the peak.  Nothing here searches for plans."""
