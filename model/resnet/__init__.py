"""Google's ResNets (BiT): the hybrids' stem and the paper's baseline, around their standardised convolution."""
