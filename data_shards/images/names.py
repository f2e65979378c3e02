"""What a user may name of decoding and evaluation. Costs nothing to import: reading a recipe needs no array."""

from __future__ import annotations

from typing import Literal

DecoderName = Literal["auto", "nvimgcodec", "gpu", "simplejpeg", "pillow"]
EvalProtocol = Literal["vit", "big_vision", "timm"]
