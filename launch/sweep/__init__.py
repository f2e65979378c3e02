"""`shardvit sweep`: train a grid of runs, select on held-out training images, train the final run on all images."""
