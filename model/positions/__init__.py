"""Where patches are: embeddings added to tokens, relative attention, interpolation at another resolution.

Imported by: files of model, formats, looking, pipeline.
Imports: files of model.
"""
