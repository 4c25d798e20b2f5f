"""Plans that save values in fewer bits than they have."""
