"""Time augmentations beside timm's and torchvision's.

Run `python -m shardvit.launch.bench.augmentation PHOTOS`, a folder of JPEGs; output in records/augmentation.txt. From
pixels in memory to pixels in memory, without decoding and crop: uint8, timm's by way of Pillow, too; timm's policies
get the same random numbers. Methods take turns, in CPU time of one thread. A minute on 2 cores.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing

from shardvit.data_shards.images.auto_augment import AutoAugment
from shardvit.data_shards.images.color_jitter import ColorJitter
from shardvit.data_shards.images.crops import DRAWS_PER_SAMPLE, RAND_AUGMENT_DRAW
from shardvit.data_shards.images.transforms import TrainTransform
from shardvit.data_shards.loading.erasing import ErasingConfig, draw_erasures
from shardvit.data_shards.order.randomness import uniforms
from shardvit.launch.bench.measure import in_turns, median_ratio, setting
from shardvit.pipeline.stage.pixels import erase

_SIDE, _IMAGES, _ROUNDS, _BATCH = 224, 300, 5, 64
Item = tuple[np.ndarray, np.ndarray]  # pixels, and the sample's numbers


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="CPU time of augmentations, beside timm's.")
    parser.add_argument("photos", type=Path, help="folder of JPEGs")
    files = sorted(parser.parse_args().photos.rglob("*.[jJ][pP]*[gG]"))
    torch.set_num_threads(1)
    whole, _, _ = _timms()
    pictures = [np.asarray(whole(Image.open(file).convert("RGB"))) for file in files[:_IMAGES]]
    draws = uniforms(1, np.arange(_IMAGES), draws=DRAWS_PER_SAMPLE)
    items = [(pictures[number % len(pictures)], row) for number, row in enumerate(draws)]
    print(setting("timm", "torchvision", "pillow"))
    print(f"{len(pictures)} photographs, {_SIDE} px, {_IMAGES} images in {_ROUNDS} rounds; CPU ms an image, medians\n")
    print(f"{'':<32}{'ours':>8}{'theirs':>8}{'ratio':>8}")
    for name, (ours, theirs) in methods().items():
        _print(name, in_turns({"ours": ours, "theirs": theirs}, items, rounds=_ROUNDS))
    config, erasing = ErasingConfig(0.25, "pixel"), RandomErasing(0.25, mode="pixel", device="cpu")
    batches = uniforms(2, np.arange(8 * _BATCH), draws=DRAWS_PER_SAMPLE).reshape(8, _BATCH, -1)
    values = torch.zeros(_BATCH, 3, _SIDE, _SIDE)
    both: dict[str, Callable[[np.ndarray], object]] = {
        "ours": lambda rows: erase(values, draw_erasures(config, rows, image_size=_SIDE)),
        "theirs": lambda rows: erasing(values),
    }
    spent = in_turns(both, list(batches), rounds=_ROUNDS)
    each = {name: [seconds / _BATCH for seconds in rounds] for name, rounds in spent.items()}
    _print("erasing of a quarter, noise", each)


def _print(name: str, spent: dict[str, list[float]]) -> None:
    mine, others = (1e3 * statistics.median(spent[which]) for which in ("ours", "theirs"))
    print(f"{name:<32}{mine:>8.3f}{others:>8.3f}{median_ratio(spent['ours'], spent['theirs']):>8.2f}")


def methods() -> dict[str, tuple[Callable[[Item], object], Callable[[Item], object]]]:
    """Ours and theirs by name."""
    found: dict[str, tuple[Callable[[Item], object], Callable[[Item], object]]] = {}
    for policy in ("3a", "original", "v0", "rand-m9-mstd0.5-inc1"):
        transform = TrainTransform(_SIDE, auto_augment=AutoAugment(policy, interpolation="bicubic"))
        found[policy] = _ours(transform), _theirs(_timms(auto_augment=policy)[1], seeds=True)
    for name, strengths in {"colour jitter": (0.3, 0.3, 0.3), "colour jitter with hue": (0.3, 0.3, 0.3, 0.1)}.items():
        transform = TrainTransform(_SIDE, color_jitter=ColorJitter(*strengths))
        found[name] = _ours(transform), _theirs(_timms(color_jitter=strengths)[1])
    return found


def _ours(transform: TrainTransform) -> Callable[[Item], object]:
    return lambda item: transform.finish(item[0], draws=item[1])


def _timms(**options: Any) -> Any:
    """timm's transforms: crop and flip, colours, tensor."""
    given: dict[str, Any] = {"color_jitter": None, **options}
    return create_transform(_SIDE, is_training=True, interpolation="bicubic", separate=True, **given)


def _theirs(transform: Any, *, seeds: bool = False) -> Callable[[Item], object]:
    def augment(item: Item) -> None:
        if seeds:
            seed = int(item[1][RAND_AUGMENT_DRAW] * 2**53)
            random.seed(seed)
            np.random.seed(seed >> 21)
        with suppress(ValueError):  # timm asks Pillow to keep no bit
            np.array(transform(Image.fromarray(item[0])))

    return augment


if __name__ == "__main__":
    main()
