"""`shardvit eval`: a model of any format on any shards, by one process or several on this machine.

Imported by: files of launch.
Imports: data_shards, files of launch, pipeline.
"""
