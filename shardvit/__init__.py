"""Pre-train, re-head and fine-tune Vision Transformers on WebDataset shards.

The four packages stand in the repository's top folder; here they are links, which a wheel has as folders.
"""

__version__ = "0.1.0"
