"""`shardvit sweep`: a grid of runs, selection on held-out training images, and the final run on all of them."""
