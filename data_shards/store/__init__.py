"""Shards that are not local files: where they are, how they are fetched, and the node's cache of them."""
