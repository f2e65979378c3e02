"""Pixels -> logits -> loss: the Vision Transformer of arXiv 2010.11929. Knows nothing of data_shards or pipeline.

`config` says what a user may ask for, `variants` what the names mean, `build` makes any model (`vit`, resnet/, `head`,
positions/), `init` fills it, `loss` trains it; `saved` is its folder, formats/ other projects' files, counting/ its
cost. Names that recipes share are in `vocabulary`, without torch.
"""
