"""Turns a joint graph and a request into a plan.

The flow, from the front to the back: `pipeline` walks the `variants` of a graph; `joint_problem` rewrites each and builds its
problem; `joint_planning` asks for the plan by the `request` and writes the report.  Policies that it asks: `plan_policy` for a
budget and tags, `shared_policy` (with `joint_allocation`) for a budget that several graphs share, `plan_store` for pinned plans,
`size_search` for sizes that vary.  Facts that they read: `settings`, `budget_source`, `plain_peaks`, `op_timing`, `deadline`.

Imports from `compile_remat.passes` only its public names.  Has no access to compiled code or to running steps.
"""
