"""The ranks that train together: messages through the process group's store, and bytes that wrappers hold beside graphs.

No function here is a collective: a rank that compiles alone waits for a limited time and goes on.  Makes no plan.
"""
