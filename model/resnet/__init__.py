"""Google's ResNets (BiT): the hybrids' stem and the paper's baseline, around their standardised convolution.

Imported by: files of model, looking, pipeline.
Imports: files of model.
"""
