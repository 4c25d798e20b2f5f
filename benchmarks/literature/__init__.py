"""What the literature on planning memory reports, and how each of it is rebuilt; `benchmarks.published` is the command."""
