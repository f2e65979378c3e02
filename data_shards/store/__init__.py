"""Shards that are not local files: where they are, how they are fetched, and the node's cache of them.

Imported by: checking, duplicates, files of data_shards, foreign, launch, loading, packing, pipeline.
Imports: files of data_shards, tars.
"""
