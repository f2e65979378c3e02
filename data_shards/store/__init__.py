"""Remote shards: where they are, how they are fetched, and the node's cache of them."""
