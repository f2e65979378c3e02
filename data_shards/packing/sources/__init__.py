"""Read sources of `shardvit pack`: folders, lists, arrays, archives, published data sets."""
