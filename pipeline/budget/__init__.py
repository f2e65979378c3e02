"""Forecast a run's memory, time, traffic, disk and reading before it starts. Pure arithmetic, no torch."""
