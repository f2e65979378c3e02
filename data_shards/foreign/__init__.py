"""Tars from other tools: their samples found, without a manifest. Imported by `data_shards.opening` alone."""
