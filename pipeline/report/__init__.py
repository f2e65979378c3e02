"""What is recorded and shown of a stage: metrics.jsonl, MLflow, the progress bar. The only room that imports mlflow.

Imported by the stage files and `launch`. Imports `checkpoint`, `ranks`, `recipe`, `stage_data`, `context`, `state`.
"""
