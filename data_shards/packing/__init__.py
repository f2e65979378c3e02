"""Pack images into shards for `shardvit pack`."""
