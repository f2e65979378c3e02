"""The recipe: its keys, reading it, arithmetic on it. No torch.

Imported by: budget, checkpoint, engine, evaluation, files of pipeline, kernels, launch, optimizers, pictures, report,
    tracking, transfer.
Imports: data_shards, files of pipeline, model.
"""
