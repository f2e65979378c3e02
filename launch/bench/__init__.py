"""Benchmark scripts; their output is kept in records/."""
