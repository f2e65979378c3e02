"""Tars of samples as a source: webdataset's, img2dataset's, and packed sets."""
