"""`shardvit plan` and `shardvit run --dry-run`: what a run will need and do, on one page, before anything is started.

Imported by `run` and `cli`. Imports `pipeline.budget`.
"""
