"""Weights in other projects' formats: `detect` reads any of them, `export` writes them.

Imported by: launch, pipeline.
Imports: files of model, positions.
"""
