"""Shard sets: manifest, tar index, labels."""
