"""Inspect a trained model: attention maps, rollout, attention distance, filters, position similarity."""
