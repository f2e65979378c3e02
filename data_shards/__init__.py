"""Images -> WebDataset shards -> samples -> batches. Knows nothing of `model` or `pipeline`."""
