"""Models that learn from images without labels."""
