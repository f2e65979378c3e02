"""Forward, backward, step and sharded state: the only room that imports deepspeed and accelerate.

Imported by: budget, checkpoint, evaluation, files of pipeline, transfer.
Imports: data_shards, files of pipeline, optimizers, ranks, recipe.
"""
