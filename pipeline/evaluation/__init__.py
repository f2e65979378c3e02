"""Evaluate a model on held-out images: metrics, counts by class, worst mistakes."""
