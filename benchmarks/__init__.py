"""Benchmarks: the tables of docs/results/, each a command (`python -m benchmarks.promise --help`)."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read once by torch's profiler, which is chatty on stderr otherwise
