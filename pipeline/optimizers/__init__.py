"""Optimizers and parameter groups: torch's fused ones, and our own where it has none."""
