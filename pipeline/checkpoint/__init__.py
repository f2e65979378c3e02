"""Saving, verifying, pruning and restoring checkpoints.

Imported by the stage files, `report` and `budget`. Imports `engine`, `ranks`, `recipe`, `run_folder`, `state`.
"""
