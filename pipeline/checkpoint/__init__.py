"""Saving, verifying, pruning and restoring checkpoints.

Imported by the stage files, `report`, `budget`, `launch`. Imports `engine`, `ranks`, `recipe`, `run_folder`, `state`.
"""
