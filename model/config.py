"""What a user may say about a model's trunk: a named variant, or its sizes one by one.

Costs nothing: pydantic only, so that reading a recipe and `shardvit --help` import neither torch nor timm.
It does not hold image size, number of classes, kind of head or dropout: these belong to a stage, because they
change between pre-training and fine-tuning while the trunk stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from model.variants import parse_variant

PositiveInt = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class VitSizes:
    """All sizes of a trunk, resolved: tokens of `width`, `depth` blocks of `heads` heads, MLPs of `mlp_dim`
    hidden units, square patches of `patch_size` pixels."""

    width: int
    depth: int
    heads: int
    mlp_dim: int
    patch_size: int

    def grid_size(self, image_size: int) -> int:
        """Patches along one side of a square image of `image_size` pixels.

        Raises:
            ValueError: `image_size` is not a positive multiple of the patch size.
        """
        if image_size <= 0 or image_size % self.patch_size:
            below = max(1, image_size // self.patch_size) * self.patch_size
            raise ValueError(
                f"image size {image_size} is not a multiple of the patch size {self.patch_size}: "
                f"take {below} or {below + self.patch_size}"
            )
        return image_size // self.patch_size


class ModelConfig(BaseModel):
    """A Vision Transformer's trunk: either `variant`, or `width`, `depth`, `heads` and `patch_size`.

    Attributes:
        variant: a name of `model.variants` and a patch size in pixels: "B/16", "L/32", "H/14", "Ti/4".
        width: size D of a token.
        depth: number of encoder blocks.
        heads: number of attention heads; divides `width`.
        mlp_dim: hidden size of the blocks' MLPs; 4 * width when left out, as in Table 1 of the ViT paper.
        patch_size: side of a patch in pixels.

    Read the numbers from `sizes`, which holds them in both cases; the fields are what the user wrote.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: str | None = None
    width: PositiveInt | None = None
    depth: PositiveInt | None = None
    heads: PositiveInt | None = None
    mlp_dim: PositiveInt | None = None
    patch_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_way_of_saying_it(self) -> Self:
        names = ("width", "depth", "heads", "mlp_dim", "patch_size")
        given = [name for name in names if getattr(self, name) is not None]
        if self.variant is not None:
            if given:
                raise ValueError(
                    f"variant {self.variant!r} already fixes {', '.join(given)}: "
                    "give either variant or the sizes, not both"
                )
            parse_variant(self.variant)
            return self
        if not given:
            raise ValueError("give a variant (such as 'B/16'), or width, depth, heads and patch_size")
        missing = [name for name in names if name != "mlp_dim" and name not in given]
        if missing:
            raise ValueError(f"without a variant, {', '.join(missing)} must be given too")
        sizes = self.sizes
        if sizes.width % sizes.heads:
            raise ValueError(f"heads {sizes.heads} must divide width {sizes.width}")
        return self

    @property
    def sizes(self) -> VitSizes:
        """The sizes in numbers, whichever way they were given."""
        if self.variant is not None:
            variant, patch_size = parse_variant(self.variant)
            return VitSizes(variant.width, variant.depth, variant.heads, variant.mlp_dim, patch_size)
        assert self.width and self.depth and self.heads and self.patch_size  # held by the validator
        return VitSizes(self.width, self.depth, self.heads, self.mlp_dim or 4 * self.width, self.patch_size)
