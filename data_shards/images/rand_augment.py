"""RandAugment(n, m) (Cubuk et al., arXiv 1909.13719) with timm's operations, as a function of one number.

timm's configuration is `rand-m{m}-n{n}-p1-mmax{max(m, 10)}`, as Google reads the paper in EfficientNet and big_vision:
all n operations are applied (`p1`; timm's default skips half of them) with strength m (no `mstd` noise; m above 10 is
not cut off: "How to train your ViT?" goes to 20), out of Google's 15 (no `inc`: posterize and solarize would grow
stronger with m; Google's grow weaker). Uncovered pixels are (128, 128, 128). Shifts reach 45 % of a side at m = 10,
Google's 100 pixels of 224.

timm draws from the global generators of `random` and numpy, which are seeded here from the sample's number and then
restored. Another version of Python or timm may augment differently. Cost: 0.1 ms for the seeds, and 0.1 to 1.4 ms an
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
from typing import TYPE_CHECKING

import numpy as np

from data_shards.errors import UserError
from data_shards.images.box import Pixels

if TYPE_CHECKING:
    from PIL import Image

_FULL_STRENGTH = 10  # timm's and Google's scale of m


_GENERATORS = threading.Lock()  # there is one of each in a process, and data workers may be threads


@dataclass(frozen=True)
class RandAugment:
    """n operations of strength m, drawn with replacement. Raises UserError for numbers out of range."""

    num_ops: int  # operations on each image
    magnitude: int  # their strength, a whole number as timm wants it; 10 is the end of most operations' scale

    def __post_init__(self) -> None:
        if self.num_ops < 1 or self.magnitude < 0 or self.magnitude != int(self.magnitude):
            raise UserError(
                f"rand_augment: num_ops {self.num_ops} must be at least 1, and magnitude {self.magnitude} a whole "
                "number, at least 0"
            )

    @property
    def timm_config(self) -> str:
        magnitude = int(self.magnitude)
        return f"rand-m{magnitude}-n{self.num_ops}-p1-mmax{max(magnitude, _FULL_STRENGTH)}"

    def __call__(self, image: Pixels, *, draw: float) -> Pixels:
        """uint8 [h, w, 3] and a uniform number in [0, 1) -> uint8 [h, w, 3]."""
        from PIL import Image

        operations = _operations(self.timm_config)
        with _seeded(int(draw * 2**53)):  # all the bits that it has
            return np.array(operations(Image.fromarray(image)))


@cache
def _operations(config: str) -> Callable[[Image.Image], Image.Image]:
    """timm's transform, from its one file: all of timm, with its models, costs each worker 200 MB and 1.4 s."""
    timm = find_spec("timm")
    assert timm is not None and timm.submodule_search_locations
    file = Path(timm.submodule_search_locations[0], "data", "auto_augment.py")
    spec = spec_from_file_location("timm_auto_augment", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    posterize = module.NAME_TO_OP["Posterize"]

    def posterize_to_black(image: Image.Image, bits_to_keep: int, **options: object) -> Image.Image:
        """Below m = 3 no bit is kept, which Pillow refuses; in Google's code black remains."""
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
