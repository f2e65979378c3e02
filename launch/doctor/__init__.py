"""`shardvit doctor`: what this machine can run, each finding with a verdict and what to do."""
