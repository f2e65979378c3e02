"""Tars that other tools wrote: their samples found, without a manifest.

Opened by `data_shards.opening`; nothing else imports this. Imports `store`, `tars`, `labels`.
"""
