"""Where patches are: embeddings added to tokens, relative attention, interpolation at another resolution.

`model.vit` adds them; `pipeline` interpolates them on the way to fine-tuning. Imports nothing but `model.config`."""
