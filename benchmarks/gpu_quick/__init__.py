"""`python -m benchmarks.gpu --quick`: all that a few minutes of a GPU are needed for, in one command that keeps to its time."""
