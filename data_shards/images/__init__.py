"""Encoded images -> squares of pixels: decode, crop, resize, augment.

Imported by: checking, duplicates, launch, loading, packing, pipeline.
Imports: files of data_shards.
"""
