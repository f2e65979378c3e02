"""What a run will need before it is started: memory, time, traffic, disk, reading. Pure arithmetic, no torch.

Imported by: files of pipeline, launch, report.
Imports: checkpoint, data_shards, engine, files of pipeline, model, recipe.
"""
