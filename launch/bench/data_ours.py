"""Our side of the data benchmark: the loader, and the training transform, measured against stock and lent to peers.

The transforms run on one core of this process. Stock draws its own boxes from the same distribution. Reference pixels:
decode the whole image with Pillow, cut out the same box, resize in float32 with torch's antialiased bilinear filter.
"""

import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE, Box, Pixels, torchvision_crop
from shardvit.data_shards.images.decode import read_image
from shardvit.data_shards.images.transforms import TrainTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.loader import Layout, TrainBatches, TrainLoader
from shardvit.data_shards.order.mixture import make_order
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.reading.opening import open_shards
from shardvit.launch.bench.data_methods import BATCH_IMAGES, CROP_AREA, PIXELS, WORKERS
from shardvit.launch.bench.measure import in_turns

OURS = TrainTransform(PIXELS, crop_area=CROP_AREA)
_SEED, _CROP_SEED = 1, 2
_LANES = 64  # same as `data.lanes: auto` for this batch
_WINDOW_IMAGES = 16384  # the recipe's default


def fast_transform() -> Callable[[bytes], Any]:
    """Our transform with its own random numbers: JPEG bytes -> torch uint8 [224, 224, 3]."""
    import torch

    rng = np.random.default_rng()

    def transform(content: bytes) -> torch.Tensor:
        pixels, _ = OURS(read_image(content), draws=rng.random(DRAWS_PER_SAMPLE))
        return torch.from_numpy(pixels)

    return transform


def batches(folder: Path, *, kind: Literal["thread", "process"] = "thread", start_step: int = 0) -> Iterator[Batch]:
    """Endless training batches from packed shards, from `start_step` on."""
    shards = open_shards(str(folder), report=lambda _: None)
    order = make_order(
        [shards.shard_sizes],
        weights=None,
        seed=_SEED,
        lanes=_LANES,
        global_batch_images=BATCH_IMAGES,
        window_images=_WINDOW_IMAGES,
    )
    layout = Layout(rank=0, world_size=1, micro_batch_size=BATCH_IMAGES, accumulation_steps=1)
    stream = TrainBatches(Access(shards), order=order, transform=OURS, layout=layout, seed=_SEED)
    return iter(TrainLoader(stream, start_step=start_step, stop_step=1 << 40, workers=WORKERS, kind=kind))


def steps_of_epoch(folder: Path) -> int:
    """Batches per epoch, rounded down."""
    return open_shards(str(folder), report=lambda _: None).num_samples // BATCH_IMAGES


@dataclass(frozen=True)
class _Item:
    content: bytes
    box: Box
    draws: NDArray[np.float64]


def measure_transform(contents: Sequence[bytes], *, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """CPU milliseconds per image of each method, by rounds; and our PSNR in dB over these JPEGs."""
    import torch

    from shardvit.launch.bench.data_peers import stock_transform

    torch.set_num_threads(1)
    stock = stock_transform()
    draws = uniforms(_CROP_SEED, np.arange(len(contents)), draws=DRAWS_PER_SAMPLE)
    items = [_item(content, own) for content, own in zip(contents, draws, strict=True)]
    methods: dict[str, Callable[[_Item], object]] = {
        "stock": lambda item: stock(item.content),
        "ours": lambda item: OURS(read_image(item.content), draws=item.draws),
        "decode": lambda item: read_image(item.content).pixels(item.box),
    }
    in_turns(methods, items[:20], rounds=1)  # load libraries before timing
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
