"""What is recorded and shown of a stage: metrics.jsonl, MLflow, the progress bar.

Imported by: figures, files of pipeline, launch.
Imports: budget, checkpoint, data_shards, files of pipeline, ranks, recipe, tracking.
"""
