"""`shardvit run`: the stages one after another, on this machine, on hosts or in a SLURM job."""
