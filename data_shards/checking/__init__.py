"""The shard doctor: what `shardvit check` does, and what a set of shards is known by.

Imported by: launch, pipeline.
Imports: duplicates, files of data_shards, foreign, images, store, tars.
"""
