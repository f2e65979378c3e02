"""Samples -> batches: decoding, mixing and the data workers of one rank."""
