"""Points of memory against time on a device: tasks, the processes that compile and time them, and what they found."""
