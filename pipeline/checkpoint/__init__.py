"""Saving, verifying, pruning and restoring checkpoints."""
