"""Weights in other projects' formats: a reader gives a `foreign.Foreign`, a writer takes our record and state dict.

`detect.import_file` reads any of them and `export.export_model` writes them; the pipeline and `shardvit import` and
`export` use these two. Imports the rest of `model`, which does not import it.
"""
