"""`shardvit doctor`: what this machine can run, as checks with a verdict and what to do.

Imported by `cli`. What libraries or GPUs could crash or hang is tried in child processes.
"""
