"""One run on several hosts: which hosts, their checks, and the ranks on all of them.

Imported by: commands, run.
Imports: data_shards, files of launch, pipeline.
"""
