"""The shard doctor: what `shardvit check` does."""
