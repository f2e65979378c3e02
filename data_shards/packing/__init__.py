"""Images -> shards, for `shardvit pack` alone; imports `sources`, `tars`, `images` and the manifest, never `store`."""
