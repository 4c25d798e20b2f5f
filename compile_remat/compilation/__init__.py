"""One Dynamo graph compiled under a request, until the emitted code keeps the budget.

Holds the closed loop between plan and code.  What happens in later steps belongs to `runtime`.
"""
