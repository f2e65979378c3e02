"""Where samples are in tars: the walk through the headers, and the indexes.

Imported by: checking, files of data_shards, foreign, packing, sources, store.
Imports: files of data_shards.
"""
