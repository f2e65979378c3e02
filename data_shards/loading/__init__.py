"""Samples -> batches: decoding, mixing and the data workers of one rank.

Imported by: launch, pipeline.
Imports: files of data_shards, images, store.
"""
