"""What `shardvit eval` and `shardvit transfer` share with their processes."""
