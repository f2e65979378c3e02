"""Sample order: which sample is at which position of which epoch. Pure functions."""
