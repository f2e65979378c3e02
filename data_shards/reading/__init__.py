"""Open a shard set of any origin and read its samples."""
