"""Models of the user's own, and which of their files may be run."""
