"""`shardvit doctor`: what this machine can run, each check with a verdict and a remedy. Imported by `cli`.

What may crash or hang (libraries, GPUs) runs in child processes.
"""
