"""Google's ResNets (BiT): the hybrids' stem and the paper's baseline, around their standardised convolution.

Imported by `model.vit` and `model.build`; imports `model.config`, `model.head` and `model.regularisation` only."""
