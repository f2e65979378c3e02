"""The training transform alone, on one core in this process: stock and ours; and how near our pixels are.

Stock draws boxes of its own from the same distribution. The yardstick of the pixels is the whole image decoded by
Pillow, the same box cut out, and torch's antialiased bilinear resize in float32, not rounded.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_shards.images.crops import DRAWS_PER_SAMPLE, Box, Pixels, torchvision_crop
from data_shards.images.decode import read_image
from data_shards.order.randomness import uniforms
from launch.bench.measure import in_turns

_SEED = 2


@dataclass(frozen=True)
class TransformResult:
    """CPU milliseconds per image of each method, one number a round, and decibels per image of ours."""

    milliseconds: dict[str, list[float]]
    psnr: list[float]


@dataclass(frozen=True)
class _Item:
    content: bytes
    box: Box
    draws: NDArray[np.float64]


def measure_transform(contents: Sequence[bytes], *, rounds: int) -> TransformResult:
    """Measure on these JPEGs."""
    import torch

    from launch.bench.data_fast import OURS
    from launch.bench.data_peers import stock_transform

    torch.set_num_threads(1)
    stock = stock_transform()
    items = _items(contents)
    methods: dict[str, Callable[[_Item], object]] = {
        "stock": lambda item: stock(item.content),
        "ours": lambda item: OURS(read_image(item.content), draws=item.draws),
        "decode": lambda item: read_image(item.content).pixels(item.box),
    }
    in_turns(methods, items[:20], rounds=1)  # first calls load libraries
    seconds = in_turns(methods, items, rounds=rounds)
    return TransformResult(
        milliseconds={name: [1000 * value for value in values] for name, values in seconds.items()},
        psnr=[_psnr(OURS(read_image(item.content), draws=item.draws)[0], item) for item in items],
    )


def _items(contents: Sequence[bytes]) -> list[_Item]:
    from launch.bench.data_fast import OURS

    draws = uniforms(_SEED, np.arange(len(contents)), draws=DRAWS_PER_SAMPLE)
    items = []
    for content, own_draws in zip(contents, draws, strict=True):
        image = read_image(content)
        box = torchvision_crop(image.height, image.width, area=OURS.crop_area, ratio=OURS.crop_ratio, draws=own_draws)
        items.append(_Item(content, box, own_draws))
    return items


def _psnr(pixels: Pixels, item: _Item) -> float:
    """Decibels of the difference to the yardstick."""
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


def psnr_summary(psnr: Sequence[float]) -> dict[str, float]:
    """Median, the level that 95 % of the images exceed, and the worst."""
    ordered = sorted(psnr)
    return {"median": statistics.median(ordered), "95 % exceed": ordered[len(ordered) // 20], "worst": ordered[0]}
