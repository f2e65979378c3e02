"""Weights in other projects' formats: `detect.import_file` reads any of them, `export.export_model` writes them."""
