"""Run `shardvit eval` (in one or several processes) and `shardvit transfer`."""
