"""Results that the literature on planning memory reports, and code that rebuilds each; `benchmarks.published` is the command."""
