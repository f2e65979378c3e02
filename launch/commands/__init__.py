"""Every command of `shardvit`, one file each; heavy imports are inside the functions."""
