"""The option `check`: one step under the plan compared with one that recomputes nothing.

Runs both and explains differences.  Decides no plan.
"""
