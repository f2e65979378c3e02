"""Images -> shards: what `shardvit pack` does."""
