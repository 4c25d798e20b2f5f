"""Devices: their figures, the table of known ones, and files that `calibrate` wrote."""
