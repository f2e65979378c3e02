"""`shardvit plan` and `shardvit run --dry-run`: what a run will need and do.

Imported by: files of launch, run, sweep.
Imports: data_shards, files of launch, model, pipeline.
"""
