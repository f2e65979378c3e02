"""Images -> shards: what `shardvit pack` does.

Imported by: launch.
Imports: duplicates, files of data_shards, images, sources, store, tars.
"""
