"""Pictures of a stage, kept as PNG and SVG in its folder: how they look, and those of its data and results.

Imported by: figures, files of pipeline, launch, tracking.
Imports: data_shards, evaluation, files of pipeline, model, ranks, recipe.
"""
