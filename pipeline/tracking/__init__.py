"""Send runs to MLflow, outside the training process. Only this package imports mlflow."""
