"""`shardvit doctor`: what this machine can run. What may crash or hang (libraries, GPUs) runs in child processes."""
