"""`shardvit run`: run the stages in order, on this machine, on hosts or in a SLURM job."""
