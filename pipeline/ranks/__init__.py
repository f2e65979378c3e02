"""The processes of a run: process groups, agreement, heartbeats, and which rank hangs, died or is slow.

Imported by everything but `recipe`. Imports nothing of `pipeline`.
"""
