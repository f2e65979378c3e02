"""`shardvit doctor`: what this machine can run. What may crash or hang (libraries, GPUs) runs in child processes.

Imported by: files of launch.
Imports: data_shards, files of launch, pipeline.
"""
