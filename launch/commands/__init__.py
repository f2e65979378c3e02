"""One file for each command of `shardvit` that is not a room of its own.

Imported by `cli`, inside the command. Imports `run` and everything below `launch`.
"""
