"""Where patches are: embeddings added to tokens, relative attention, interpolation at another resolution."""
