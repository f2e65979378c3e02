"""Images -> shards: what `shardvit pack` does. `pack` decides, `shard_plan` plans, `shard_writer` writes.

Imported by the command line alone; imports `sources`, `tars`, `images` and the manifest, never `store`.
"""
