"""What is written of a stage: metrics.jsonl, MLflow, the progress bar. The only room that imports mlflow.

Imported by the stage files. Imports `checkpoint`, `ranks` and `recipe`.
"""
