"""Turns a joint graph and a request into a plan: settings, policies, pinned plans, deadlines, shared budgets.

Imports from `compile_remat.passes` only its public names.  Has no access to compiled code or to running steps.
"""
