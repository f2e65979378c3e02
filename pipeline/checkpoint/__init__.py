"""Save, verify, prune and restore checkpoints."""
