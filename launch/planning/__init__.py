"""`shardvit plan` and `--dry-run`: what a run will need, on one page.

Imported by `run` and `cli`. Imports `pipeline.budget`; starts nothing.
"""
