"""Weights in Google's npz files, of vision_transformer and big_vision.

Imported by: files of model.formats.
Imports: files of model, files of model.formats, positions.
"""
