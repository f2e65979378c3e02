"""Check shards for `shardvit check`, and identify a set of shards."""
