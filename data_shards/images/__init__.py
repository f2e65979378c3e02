"""Encoded images -> squares of pixels: decode, crop, resize, augment.

Imported by: checking, duplicates, files of data_shards, launch, loading, packing, pipeline.
Imports: files of data_shards.
"""
