"""The training transform alone, on one core of this process: stock's and ours; and the error of our pixels.

Stock draws its own boxes from the same distribution. The reference of the pixels is the whole image decoded by Pillow,
the same box cut out, and torch's antialiased bilinear resize in float32, not rounded.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_shards.images.box import Box, Pixels
from data_shards.images.crops import DRAWS_PER_SAMPLE, torchvision_crop
from data_shards.images.decode import read_image
from data_shards.order.randomness import uniforms
from launch.bench.data_ours import OURS
from launch.bench.measure import in_turns

_SEED = 2


@dataclass(frozen=True)
class _Item:
    content: bytes
    box: Box
    draws: NDArray[np.float64]


def measure_transform(contents: Sequence[bytes], *, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """CPU milliseconds an image of each method, by rounds; and the decibels of ours (PSNR) over these JPEGs: the
    median, what 95 % of them exceed, and the worst."""
    import torch

    from launch.bench.data_peers import stock_transform

    torch.set_num_threads(1)
    stock = stock_transform()
    draws = uniforms(_SEED, np.arange(len(contents)), draws=DRAWS_PER_SAMPLE)
    items = [_item(content, own) for content, own in zip(contents, draws, strict=True)]
    methods: dict[str, Callable[[_Item], object]] = {
        "stock": lambda item: stock(item.content),
        "ours": lambda item: OURS(read_image(item.content), draws=item.draws),
        "decode": lambda item: read_image(item.content).pixels(item.box),
    }
    in_turns(methods, items[:20], rounds=1)  # first calls load libraries
    seconds = in_turns(methods, items, rounds=rounds)
    psnr = sorted(_psnr(OURS(read_image(item.content), draws=item.draws)[0], item) for item in items)
    return (
        {name: [1000 * value for value in values] for name, values in seconds.items()},
        {"median": statistics.median(psnr), "95 % exceed": psnr[len(psnr) // 20], "worst": psnr[0]},
    )


def _item(content: bytes, draws: NDArray[np.float64]) -> _Item:
    image = read_image(content)
    box = torchvision_crop(image.height, image.width, area=OURS.crop_area, ratio=OURS.crop_ratio, draws=draws)
    return _Item(content, box, draws)


def _psnr(pixels: Pixels, item: _Item) -> float:
    import torch
    from PIL import Image

    box = item.box
    with Image.open(io.BytesIO(item.content)) as image:
        crop = np.asarray(image.convert("RGB"))[box.top : box.bottom, box.left : box.right]
    exact = torch.nn.functional.interpolate(
        torch.from_numpy(crop.astype(np.float32)).permute(2, 0, 1)[None],
        size=pixels.shape[:2],
        mode="bilinear",
        antialias=True,
        align_corners=False,
    )
    error = torch.from_numpy(pixels).double() - exact[0].permute(1, 2, 0).double()
    return 10 * math.log10(255**2 / max(float((error**2).mean()), 1e-12))
