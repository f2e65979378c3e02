"""`shardvit watch`: follow a run in the terminal, on this machine or in SLURM."""
