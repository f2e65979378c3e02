"""Tars from other tools: their samples found, without a manifest.

Imported by: checking, files of data_shards.
Imports: files of data_shards, store, tars.
"""
