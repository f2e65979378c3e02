"""Predict what a run will need and do: `shardvit plan` and `shardvit run --dry-run`."""
