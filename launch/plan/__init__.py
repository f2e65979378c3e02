"""`shardvit plan` and `shardvit run --dry-run`: what a run will need and do."""
