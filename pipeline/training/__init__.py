"""One training stage, assembled and run: the stages, THE loop, and what it is assembled from."""
