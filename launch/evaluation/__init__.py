"""Carry out `shardvit eval` (also in several processes) and `shardvit transfer`."""
