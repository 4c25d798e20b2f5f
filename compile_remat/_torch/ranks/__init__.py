"""What torch says of the processes that train together.  Imports nothing of ours."""
