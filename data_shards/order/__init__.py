"""Sample order: which sample stands at which position of which epoch. Pure functions."""
