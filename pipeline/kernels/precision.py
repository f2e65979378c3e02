"""Float32 products on a GPU: in full precision (`ieee`), or on tensor cores with 10 bits of mantissa (`tf32`).

torch leaves TF32 off for matrix products and on for cuDNN's convolutions; here both follow `engine.fp32_matmul`. On a
CPU there is no TF32. The older switches are set because they keep the newer ones (`fp32_precision`) in step, while
readers of the older (inductor among them) raise where only the newer were set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch


@contextlib.contextmanager
def fp32_products(kind: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Within it, float32 matrix products and convolutions on a GPU are of this kind."""
    before = bool(torch.backends.cuda.matmul.allow_tf32), torch.backends.cudnn.allow_tf32
    try:
        _allow_tf32(kind == "tf32", kind == "tf32")
        yield
    finally:
        _allow_tf32(*before)


def _allow_tf32(products: bool, convolutions: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = products
    torch.backends.cudnn.allow_tf32 = convolutions
