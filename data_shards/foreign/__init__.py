"""Tars that other tools wrote: their samples found, without a manifest.

Opened by `shard_set`; nothing else imports this. Imports `store`, `tars`, `labels`.
"""
