"""`--max-image-pixels` of `pack`, `check` and `predict`: what `data.max_image_pixels` is for a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from data_shards.images.decode import PixelLimit

MaxImagePixels = Annotated[
    int, Parameter(help="Larger images are not decoded, which takes up to 17 bytes a pixel and core.")
]


def pixel_limit(max_image_pixels: int) -> PixelLimit:
    """The flag's value, as decoding takes it.

    Raises:
        UserError: it is no number of pixels that can be allowed.
    """
    from data_shards.images.decode import PixelLimit

    return PixelLimit(max_image_pixels, name="--max-image-pixels")
