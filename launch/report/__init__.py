"""`shardvit report` and `compare`: runs as one self-contained HTML page, and beside one another on the terminal.

Imported by: files of launch.
Imports: data_shards, files of launch, pipeline.
"""
