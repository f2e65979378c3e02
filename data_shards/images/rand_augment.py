"""RandAugment(n, m) (Cubuk et al., arXiv 1909.13719): n random operations of strength m, as a function of one number.

Two sets of operations, both by timm's code:

ranges timm        timm's `rand-m{m}-n{n}-p1-mmax{max(m, 10)}`: all n operations are applied (`p1`; timm's default skips
                   half of them) with strength m (no `mstd` noise; m above 10 is not cut off: "How to train your ViT?"
                   goes to 20), out of 15 (no `inc`: posterize and solarize would grow stronger with m; Google's grow
                   weaker). Shifts reach 45 % of a side at m = 10; what is turned is interpolated
ranges big_vision  big_vision's (EfficientNet's): see `big_vision_operations`

Uncovered pixels are (128, 128, 128) in both. timm draws from the global generators of `random` and numpy, which are
seeded here from the sample's number and then restored; big_vision's draws are a function of that number. Another
version of Python (ranges timm) or timm may augment differently. Cost: 0.1 ms for timm's seeds, and 0.1 to 1.4 ms an
operation at 224 pixels: 1.2 ms an image for two of them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from data_shards.errors import UserError
from data_shards.images.big_vision_operations import OPERATIONS, Draw, apply
from data_shards.images.box import Pixels
from data_shards.order.randomness import uniforms
from data_shards.vocabulary import RandAugmentRanges, RandomStream

if TYPE_CHECKING:
    from PIL import Image

_FULL_STRENGTH = 10  # timm's and Google's scale of m
_GENERATORS = threading.Lock()  # there is one of each in a process, and data workers may be threads


@dataclass(frozen=True)
class RandAugment:
    """n operations of strength m, drawn with replacement. Raises UserError for numbers out of range."""

    num_ops: int  # operations on each image
    magnitude: int  # their strength, a whole number as timm wants it; 10 is the end of most operations' scale
    ranges: RandAugmentRanges = "timm"

    def __post_init__(self) -> None:
        if self.num_ops < 1 or self.magnitude < 0 or self.magnitude != int(self.magnitude):
            given = f"num_ops {self.num_ops} must be at least 1, and magnitude {self.magnitude}"
            raise UserError(f"rand_augment: {given} a whole number, at least 0")

    @property
    def timm_config(self) -> str:
        magnitude = int(self.magnitude)
        return f"rand-m{magnitude}-n{self.num_ops}-p1-mmax{max(magnitude, _FULL_STRENGTH)}"

    def __call__(self, image: Pixels, *, draw: float) -> Pixels:
        """uint8 [h, w, 3] and a uniform number in [0, 1) -> uint8 [h, w, 3]."""
        from PIL import Image

        seed = int(draw * 2**53)  # all the bits that it has
        picture = Image.fromarray(image)
        if self.ranges == "big_vision":
            draws = uniforms(RandomStream.RAND_AUGMENT, seed, draws=4 * self.num_ops)
            for which, *rest in draws.reshape(-1, 4).tolist():
                name = OPERATIONS[int(which * len(OPERATIONS))]
                picture = apply(name, picture, magnitude=self.magnitude, draw=Draw(*rest), timm=timms_operations())
            return np.array(picture)
        operations = _operations(self.timm_config)
        with _seeded(seed):
            return np.array(operations(picture))


@cache
def timms_operations() -> ModuleType:
    """Load timm's file of operations alone: all of timm costs each worker 200 MB and 1.4 s."""
    timm = find_spec("timm")
    assert timm is not None and timm.submodule_search_locations
    file = Path(timm.submodule_search_locations[0], "data", "auto_augment.py")
    spec = spec_from_file_location("timm_auto_augment", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _operations(config: str) -> Callable[[Image.Image], Image.Image]:
    """Make timm's transform, with posterize mended."""
    module = timms_operations()
    posterize = module.posterize

    def posterize_to_black(image: Image.Image, bits_to_keep: int, **options: object) -> Image.Image:
        """Return black below m = 3, where no bit is kept, which Pillow refuses."""
        from PIL import Image

        return posterize(image, bits_to_keep, **options) if bits_to_keep else Image.new(image.mode, image.size)

    module.NAME_TO_OP["Posterize"] = posterize_to_black
    return module.rand_augment_transform(config)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with _GENERATORS:
        of_python, of_numpy = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed >> 21)  # it takes 32 bits; the upper ones
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
