"""What happens while a compiled graph runs: measured peaks, the budget of a whole step, recovery from out-of-memory.

Hands requests to whoever compiles; compiles nothing itself.
"""
