"""`shardvit watch`: a page in the terminal that follows a run, on this machine or in SLURM.

Imported by: files of launch.
Imports: data_shards, files of launch, pipeline, slurm.
"""
