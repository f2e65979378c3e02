"""`shardvit watch`: a page in the terminal that follows a run, on this machine or in SLURM."""
