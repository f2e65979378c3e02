"""`shardvit report` and `compare`: runs as one self-contained HTML page, and beside one another on the terminal.

Imported by: commands, figures, files of launch, show.
Imports: data_shards, files of launch, model, pipeline.
"""
