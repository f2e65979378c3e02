"""The ViT paper's figures: of one model (attention, filters, positions), and of several runs (over size and cost).

Imported by: files of pipeline, launch.
Imports: data_shards, files of pipeline, model, pictures, report, transfer.
"""
