"""A file for each command of `shardvit` without a room of its own; heavy imports are inside.

Imported by: files of launch.
Imports: data_shards, files of launch, hosts, model, pipeline, report, run, sweep.
"""
