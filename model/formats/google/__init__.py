"""Weights in Google's npz files, of vision_transformer and big_vision."""
