"""One file for each command of `shardvit` that has no room of its own; heavy imports are inside the commands.

Imported by `cli`. Imports `run` and everything below `launch`.
"""
