"""`shardvit fewshot`, `probe`, `knn` and `transfer`: what a model's features are worth on other images.

Imported by: files of launch.
Imports: data_shards, files of launch, pipeline.
"""
