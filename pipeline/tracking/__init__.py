"""MLflow: a run per pipeline and stage, sent beside training. The only room that imports mlflow."""
