"""Forecast memory, time, traffic, disk and reading of a run before it starts. Pure arithmetic, no torch."""
