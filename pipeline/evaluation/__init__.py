"""What a model does on images that it was not trained on: scores, counts by class, and its worst mistakes, kept."""
