"""Devices: their figures, the table of known devices, device files such as those of `calibrate`, links, and the allocator."""
