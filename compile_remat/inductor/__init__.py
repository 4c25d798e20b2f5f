"""Inductor: how it is entered, kept to a plan and read.  The only place beside `_torch` with private names of torch.

Knows no budgets and no plans; may import `_torch` and `_util`.
"""
