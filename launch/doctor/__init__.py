"""`shardvit doctor`: what this machine can run; what may crash or hang is tried in child processes."""
