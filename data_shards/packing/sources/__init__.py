"""Read what `shardvit pack` packs: folders, lists, arrays, archives, published data sets."""
