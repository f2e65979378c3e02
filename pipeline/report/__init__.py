"""What is recorded and shown of a stage: metrics.jsonl, MLflow, the progress bar."""
