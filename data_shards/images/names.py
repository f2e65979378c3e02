"""What a user may name of decoding and evaluation. Costs nothing to import: reading a recipe needs no array."""

from __future__ import annotations

from typing import Literal

DecoderName = Literal["auto", "nvimgcodec", "gpu", "simplejpeg", "pillow"]
EvalProtocol = Literal["vit", "big_vision", "timm"]

MOST_PIXELS = 178_956_970  # where Pillow speaks of a decompression bomb: 2 * (2**30 // 4 // 3)
# Pillow takes up to 17 bytes a pixel, so 0.85 GB a worker; the photographs of most cameras pass.
USUAL_MOST_PIXELS = 50_000_000
