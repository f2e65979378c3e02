"""Optimizers and parameter groups: torch's and timm's, or our own where Google's recipes differ."""
