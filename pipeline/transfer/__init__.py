"""What a model's features are worth on other images: few-shot least squares, linear probe, kNN, tables of data sets."""
