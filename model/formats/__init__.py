"""Weights in other projects' formats: a reader gives a `foreign.Foreign`, a writer takes our record and state dict.

`detect.import_file` reads any of them and `export.export_model` writes them.
"""
