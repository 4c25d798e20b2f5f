"""Plans of a forecast that Inductor has lowered: here for a CPU, in a process that believes in the device for a GPU.

What cannot be lowered is estimated by rules, see `target_step`, and the forecast says why.
"""
