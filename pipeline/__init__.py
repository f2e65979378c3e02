"""Recipe -> engine -> checkpoint -> MLflow: the three stages and the training loop."""
