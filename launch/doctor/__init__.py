"""`shardvit doctor`: check what this machine can run. What may crash or hang runs in child processes."""
