"""The processes of a run: process group, agreement, heartbeats, and which rank hangs, died or is slow."""
