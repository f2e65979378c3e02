"""`shardvit figures`: the ViT paper's figures of one model, on any images, as a page and as files.

Imported by: files of launch.
Imports: data_shards, files of launch, model, pipeline, report, show.
"""
