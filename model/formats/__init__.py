"""Weights in other projects' formats: each reader gives a `Foreign`, each writer takes our record and state dict."""
