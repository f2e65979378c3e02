"""MLflow: a run per pipeline and stage, sent beside training. The only room that imports mlflow.

Imported by: launch, report.
Imports: checkpoint, data_shards, files of pipeline, model, recipe.
"""
