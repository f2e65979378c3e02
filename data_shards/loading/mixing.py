"""Draw mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899) as a function of (seed, step); the device mixes.

In the global batch of step s, slot i is mixed with slot i + 1 (the last with the first), as in big_vision (timm
reverses the batch). The whole batch shares one weight and one box, functions of the seed and s, so the mixed images do
not depend on the world size; a process needs one sample more than its own.

Mixup gives an image itself the weight max(lambda, 1 - lambda), as big_vision does: the smaller one would repeat the
same pairs. timm weighs one image of a pair by lambda and the other by 1 - lambda: its mixed images are distributed
alike, only that each pair occurs twice in a batch. CutMix pastes timm's box: sides sqrt(1 - lambda) of the image's,
centre anywhere, cut off at the edges; the weight is the area left. scipy inverts the Beta distribution, so that a draw
needs one number. Cost: 0.1 ms a batch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.order.randomness import uniforms
from shardvit.data_shards.vocabulary import RandomStream


@dataclass(frozen=True)
class MixupConfig:
    """Settings of mixup and CutMix: lambda is drawn from Beta(alpha, alpha). UserError for numbers out of range."""

    mixup_alpha: float = 0.0  # 0: off; 0.2 and 0.5 in big_vision's recipes
    cutmix_alpha: float = 0.0  # 0: off; 1.0 in its paper
    switch_share: float = 0.5  # share of batches with CutMix, if both are on
    mixed_share: float = 1.0  # of the batches

    def __post_init__(self) -> None:
        for name in ("mixup_alpha", "cutmix_alpha"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} {getattr(self, name)} must be 0 (off) or a positive number")
        for name in ("switch_share", "mixed_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} {getattr(self, name)} of mixing must be between 0 and 1")


@dataclass(frozen=True)
class Mix:
    """The mixing of one global batch."""

    kind: Literal["mixup", "cutmix", "none"]  # none: of a batch that a mixed_share below 1 leaves as it is
    keep: float  # weight of the image itself and its labels; the partner has the rest
    box: Box | None = None  # CutMix: the part taken from the partner, after its flip; None if empty


def draw_mix(config: MixupConfig | None, *, seed: int, step: int, image_size: int) -> Mix | None:
    """Draw the mixing of step `step`'s global batch, or None for no mixing; `image_size` is the side in pixels."""
    if config is None or (config.mixup_alpha == 0 and config.cutmix_alpha == 0):
        return None
    if config.mixed_share < 1 and uniforms(RandomStream.MIX, seed, step, draws=5)[0, 4] >= config.mixed_share:
        return Mix("none", keep=1.0)
    which, share, down, right = uniforms(RandomStream.MIX, seed, step, draws=4)[0].tolist()
    is_cutmix = config.cutmix_alpha > 0 and (config.mixup_alpha == 0 or which < config.switch_share)
    if is_cutmix:
        box = _cut(1 - _beta(config.cutmix_alpha, share), size=image_size, down=down, right=right)
        area = box.height * box.width if box else 0
        return Mix("cutmix", keep=1 - area / image_size**2, box=box)
    weight = _beta(config.mixup_alpha, share)
    return Mix("mixup", keep=max(weight, 1 - weight))


def _beta(alpha: float, share: float) -> float:
    """Invert the distribution of Beta(alpha, alpha) at `share`."""
    from scipy.special import betaincinv

    return float(betaincinv(alpha, alpha, share))


def _cut(area: float, *, size: int, down: float, right: float) -> Box | None:
    """Cut a square with that share of the image's area, centred at (down, right), at the image's edges."""
    side = int(size * math.sqrt(area))
    centre_y, centre_x = int(down * size), int(right * size)
    top, bottom = max(centre_y - side // 2, 0), min(centre_y + (side + 1) // 2, size)
    left, end = max(centre_x - side // 2, 0), min(centre_x + (side + 1) // 2, size)
    return Box(top=top, left=left, height=bottom - top, width=end - left) if side else None
