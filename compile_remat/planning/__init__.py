"""From a joint graph and a request to a plan: settings, policies, pinned plans, deadlines, shared budgets.

Calls `passes` by its face.  Knows nothing of compiled code or of running steps.
"""
