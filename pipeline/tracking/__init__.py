"""MLflow: a run per pipeline and stage, sent beside training. The only room that imports mlflow.

Imported by: files of pipeline, launch, report.
Imports: checkpoint, data_shards, files of pipeline, model, pictures, recipe.
"""
