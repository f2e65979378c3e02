"""Images that grow during a stage: `image_size: {from: 128, to: 224, over: 60%, steps: 4}`. No torch.

The first `over` of the stage is cut into `steps` phases of equal length. Phase k = 0, 1, ... takes squares of
from + (to - from) k / steps pixels, rounded to whole patches (a ResNet's strides), halves up; all later steps take
`to`, as do evaluations, the model's positions and its files. So `over: 75%, steps: 3` are the four equal stages of
EfficientNetV2 (arXiv 2104.00298, algorithm 1). The batch keeps its images: an early step sees as many, and costs less.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, PlainSerializer, Tag

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.size_phases import SizePhase
from shardvit.data_shards.text import counted
from shardvit.pipeline.recipe.data import MOST_SIDE
from shardvit.pipeline.recipe.duration import DurationText, Strict

_Side = Annotated[int, Field(gt=0, le=MOST_SIDE)]


class ImageGrowth(Strict):
    """Smaller images at the beginning of a stage."""

    from_: int = Field(alias="from", gt=0, le=MOST_SIDE)
    """Side of the first phase's images, in pixels: a multiple of the patch size."""
    to: _Side
    """Side at the end, in pixels: the stage's image size for everything else."""
    over: DurationText
    """Length of all phases together; the rest of the stage is at `to`."""
    steps: int = Field(ge=1, le=16)
    """Number of phases before `to`, each of another size and all of the same length."""

    def problems(self) -> Iterator[str]:
        if self.from_ >= self.to:
            yield f"from {self.from_} is not below to {self.to}: make it smaller, or give one number alone"

    def sizes(self, stride: int) -> tuple[int, ...]:
        """Sides of the phases, `to` last, in whole `stride`s."""
        less, most, steps = self.from_ // stride, self.to // stride, self.steps
        rounded = (less + (2 * (most - less) * phase + steps) // (2 * steps) for phase in range(steps + 1))
        return tuple(stride * patches for patches in rounded)

    def phases(self, stride: int, *, over_steps: int, total_steps: int, key: str) -> tuple[SizePhase, ...]:
        """Lay the phases out over the stage's steps; UserError, naming `key`, if they do not fit."""
        if over_steps < self.steps:
            raise UserError(
                f"{key}.over takes {counted(over_steps, 'step')}, too few for {counted(self.steps, 'phase')}: make it "
                "longer, or steps fewer"
            )
        if over_steps >= total_steps:
            raise UserError(
                f"{key}.over takes {over_steps} of {total_steps} steps, and nothing is left at {self.to} pixels: make "
                "it shorter"
            )
        return tuple(
            SizePhase(-(-phase * over_steps // self.steps), size) for phase, size in enumerate(self.sizes(stride))
        )


class GrowingSize(int):
    """The last side of a stage's images, for all that asks for one number, with its `growth`."""

    growth: ImageGrowth

    def __new__(cls, growth: ImageGrowth) -> "GrowingSize":
        size = super().__new__(cls, growth.to)
        size.growth = growth
        return size

    def __getnewargs__(self) -> tuple[ImageGrowth]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.growth,)


def growth_of(image_size: int) -> ImageGrowth | None:
    """Return how a stage's images grow; None: they do not."""
    return image_size.growth if isinstance(image_size, GrowingSize) else None


def shown(image_size: int) -> str:
    """Describe it: "224 px", or "128 to 224 px"."""
    growth = growth_of(image_size)
    return f"{growth.from_} to {growth.to} px" if growth else f"{image_size} px"


def _as_written(image_size: int) -> int | dict[str, Any]:
    growth = growth_of(image_size)
    return growth.model_dump(mode="json", by_alias=True) if growth else image_size


if TYPE_CHECKING:
    ImageSize = int
else:
    _Kinds = Annotated[_Side, Tag("size[number]")] | Annotated[ImageGrowth, Tag("size[growth]")]
    ImageSize = Annotated[
        _Kinds,
        Discriminator(lambda given: "size[growth]" if isinstance(given, dict | ImageGrowth) else "size[number]"),
        AfterValidator(lambda given: GrowingSize(given) if isinstance(given, ImageGrowth) else given),
        PlainSerializer(_as_written),
    ]
