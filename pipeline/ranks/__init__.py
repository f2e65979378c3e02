"""The processes of a run: process group, agreement, heartbeats, and which rank hangs, died or is slow.

Imported by: checkpoint, engine, evaluation, files of pipeline, launch, pictures, report, transfer.
Imports: data_shards.
"""
