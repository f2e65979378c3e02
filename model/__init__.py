"""Pixels -> logits -> loss: the Vision Transformer of arXiv 2010.11929. Imports neither data_shards nor pipeline.

`config` is what a user may ask for, `variants` the named sizes, `vit` builds any model (with resnet, layers/,
positions/), `init` fills it, `loss` trains it; saved/ stores it, formats/ converts it, counting/ gives its cost.
`vocabulary` has the names that recipes share, without torch.
"""
