"""The user's own code, by path."""
