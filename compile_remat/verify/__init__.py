"""The option `check`: compares one step under the plan with one under a plan that recomputes nothing.

Runs both plans and explains differences.  Chooses no plan.
"""
