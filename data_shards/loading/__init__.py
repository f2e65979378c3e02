"""Samples -> batches: decoding, mixing and the worker processes of one rank.

The top of `data_shards`: imports any of it, and is imported by `pipeline` alone.
"""
