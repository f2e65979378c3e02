"""The shard doctor: what `shardvit check` does, and what a set of shards is known by."""
