"""Pixels -> logits -> loss: the Vision Transformer of arXiv 2010.11929. Knows nothing of data_shards or pipeline."""
