"""Our side of the data benchmark: the loader, and the training transform, measured against stock and lent to peers.

The transforms run on one core of this process. Stock draws its own boxes from the same distribution. Reference pixels:
decode the whole image with Pillow, cut out the same box, resize in float32 with torch's antialiased bilinear filter.
"""

import io
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE, Box, Pixels, torchvision_crop
from shardvit.data_shards.images.decode import decode_together, read_image
from shardvit.data_shards.images.transforms import TrainTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.loader import Layout, TrainBatches, TrainLoader
from shardvit.data_shards.loading.memory import TOGETHER
from shardvit.data_shards.order.mixture import make_order
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.reading.opening import open_shards
from shardvit.launch.bench.data_limit import NoLimit, compile_limit
from shardvit.launch.bench.data_methods import BATCH_IMAGES, CROP_AREA, PIXELS, TRANSFORMS, WORKERS
from shardvit.launch.bench.measure import in_turns

OURS = TrainTransform(PIXELS, crop_area=CROP_AREA)
_SEED, _CROP_SEED = 1, 2
ORDER: dict[str, Any] = {
    "seed": _SEED,
    "lanes": 64,  # same as `data.lanes: auto` for this batch
    "global_batch_images": BATCH_IMAGES,
    "window_images": 16384,  # the recipe's default
}


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
    order = make_order([shards.shard_sizes], weights=None, **ORDER)
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


def opencv_transform() -> Callable[[bytes], Any]:
    """A few lines of OpenCV with our boxes: JPEG bytes -> torch uint8 [224, 224, 3]."""
    import torch

    rng, resize = np.random.default_rng(), opencv_resize()

    def transform(content: bytes) -> torch.Tensor:
        image = read_image(content)
        return torch.from_numpy(
            resize(content, OURS.box(image.height, image.width, draws=rng.random(DRAWS_PER_SAMPLE)))
        )

    return transform


def opencv_resize() -> Callable[[bytes, Box], Pixels]:
    """Whole decode and INTER_AREA, which averages areas where it shrinks and is bilinear where it enlarges."""
    cv2: Any = import_module("cv2")
    cv2.setNumThreads(1)

    def resize(content: bytes, box: Box) -> Pixels:
        whole = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
        crop = whole[box.top : box.bottom, box.left : box.right]
        return cv2.resize(crop, (PIXELS, PIXELS), interpolation=cv2.INTER_AREA)

    return resize


def measure_transform(
    contents: Sequence[bytes], *, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
    """CPU milliseconds per image of each method, by rounds; our PSNR in dB over these JPEGs; methods left out, why."""
    import torch

    from shardvit.launch.bench.data_peers import stock_transform

    torch.set_num_threads(1)
    stock, skipped = stock_transform(), {}
    draws = uniforms(_CROP_SEED, np.arange(len(contents)), draws=DRAWS_PER_SAMPLE)
    items = [_item(content, own) for content, own in zip(contents, draws, strict=True)]
    methods: dict[str, Callable[[_Item], object]] = {"stock": lambda item: stock(item.content)}
    try:
        opencv = opencv_resize()
        methods["opencv"] = lambda item: opencv(item.content, item.box)
    except ImportError as error:
        skipped["opencv"] = str(error)
    methods["alone"] = lambda item: OURS(read_image(item.content), draws=item.draws)
    with tempfile.TemporaryDirectory(prefix="shardvit-bench-") as folder:
        try:
            limit = compile_limit(Path(folder))
            methods["limit"] = lambda item: limit(item.content, item.box)
        except NoLimit as error:
            skipped["limit"] = str(error)
    of_groups: dict[str, Callable[[Sequence[_Item]], object]] = {"ours": _together, "decode": _decode_together}
    for name, method in methods.items():
        of_groups[name] = lambda group, method=method: [method(item) for item in group]
    groups = [items[first : first + TOGETHER] for first in range(0, len(items), TOGETHER)]
    in_turns(of_groups, groups[:2], rounds=1)  # load libraries before timing
    seconds = {name: [0.0] * rounds for name in of_groups}
    for number in range(rounds):
        for group in groups:  # short turns: a loaded machine's speed changes within a second
            for name, (spent,) in in_turns(of_groups, [group], rounds=1).items():
                seconds[name][number] += 1000 * spent / len(items)
    psnr = sorted(_psnr(pixels, item) for group in groups for pixels, item in zip(_together(group), group, strict=True))
    return (
        {name: seconds[name] for name in TRANSFORMS if name in seconds},
        {"median": statistics.median(psnr), "95 % exceed": psnr[len(psnr) // 20], "worst": psnr[0]},
        skipped,
    )


def _together(group: Sequence[_Item]) -> NDArray[np.uint8]:
    """Our transform as the loader calls it."""
    into = np.empty((len(group), PIXELS, PIXELS, 3), np.uint8)
    for item, pixels, own in zip(group, _decode_together(group), into, strict=True):
        OURS.finish(pixels, draws=item.draws, into=own)
    return into


def _decode_together(group: Sequence[_Item]) -> list[Pixels]:
    images = [read_image(item.content) for item in group]
    parts = [
        (image, OURS.box(image.height, image.width, draws=item.draws))
        for image, item in zip(images, group, strict=True)
    ]
    return [
        image.pixels(box) if pixels is None else pixels
        for (image, box), pixels in zip(parts, decode_together(parts), strict=True)
    ]


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
