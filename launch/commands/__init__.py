"""A file for each command of `shardvit` without a room of its own; heavy imports are inside."""
