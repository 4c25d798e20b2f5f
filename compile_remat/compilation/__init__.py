"""Compiles one Dynamo graph under a request, until the emitted code keeps the budget.

Holds the closed loop between plan and code.  Everything about later steps belongs to `runtime`.
"""
