"""Images -> shards: what `shardvit pack` does.

Imported by: launch.
Imports: files of data_shards, images, sources, tars.
"""
