"""Commands that follow runs and show their results."""
