"""The ranks that train together: what they tell each other through the process group's store, and what wrappers hold beside graphs.

Nothing in here is a collective: a rank that compiles alone waits for a limited time and goes on.  Makes no plan.
"""
