"""Samples -> batches: decoding, mixing and data workers of one rank. Imported by `pipeline` alone."""
