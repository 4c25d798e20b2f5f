"""Plans of a forecast, lowered by Inductor: in this process for a CPU, in a process with a fake device for a GPU.

The peak of a plan that cannot be lowered is estimated by rules, see `target_step`, and the forecast gives the reason.
"""
