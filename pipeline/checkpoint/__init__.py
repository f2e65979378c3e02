"""Saving, verifying, pruning and restoring checkpoints.

Imported by: budget, files of pipeline, launch, report, tracking, transfer.
Imports: data_shards, engine, files of pipeline, ranks, recipe.
"""
