"""What a model does on images that it was not trained on: scores, counts by class, and its worst mistakes, kept.

Imported by: files of pipeline, launch, pictures.
Imports: data_shards, engine, files of pipeline, model, ranks, recipe.
"""
