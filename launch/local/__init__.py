"""Processes on this machine: start, signal, kill and await ranks; read the environment; guard the output."""
