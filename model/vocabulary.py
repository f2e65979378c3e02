"""The names that a user may write about a model, and what they stand for; torch-free, for recipes and plans.

To add a loss: its name here and its function in `model/loss.py`. A head: here and `model/head.py`; a pooling: here and
`model/vit.py`; a position embedding: here and `model/positions/embedding.py`; initial values: here and `model/init.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Literal

LossKind = Literal["softmax", "sigmoid"]
HeadKind = Literal["mlp", "linear"]
Pool = Literal["cls", "gap", "map"]
PositionKind = Literal["learned_1d", "learned_2d", "relative", "sincos_2d", "none"]
PositionAt = Literal["stem", "every_layer", "every_layer_shared"]
Gelu = Literal["tanh", "erf"]
Interpolation = Literal["google", "timm"]
InitStyle = Literal["google", "timm"]
EvalProtocol = Literal["vit", "big_vision", "timm"]

COLOUR_LEVELS = 8  # of a channel in masked patch prediction: 3 bits
COLOURS = tuple(f"r{red} g{green} b{blue}" for red, green, blue in product(range(COLOUR_LEVELS), repeat=3))
"""The name of each of its classes; class 64 r + 8 g + b."""
