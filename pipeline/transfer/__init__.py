"""What a model's features are worth on other images: few-shot least squares, linear probe, kNN, tables of data sets.

Imported by: figures, files of pipeline, launch.
Imports: checkpoint, data_shards, engine, files of pipeline, model, ranks, recipe.
"""
