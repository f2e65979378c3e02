"""People's own code."""
