"""Weights in other projects' formats: `detect` reads any of them, `export` writes them."""
