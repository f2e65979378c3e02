"""`shardvit show`: what is in shards, and what a recipe makes of it, as a page to look at before training.

Imported by: figures, files of launch.
Imports: data_shards, files of launch, pipeline, report.
"""
