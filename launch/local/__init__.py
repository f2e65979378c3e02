"""Processes on this machine: start ranks, wait for them, signal and kill them, name their ends."""
