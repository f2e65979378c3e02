"""Measure a model's features on other images: few-shot least squares, linear probe, kNN, tables of data sets."""
