"""Position embeddings, relative attention, and interpolation to another resolution."""
