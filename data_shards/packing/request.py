"""What a packing is asked for: checked, and in the form in which pack.json keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.images.decode import PixelLimit
from data_shards.packing.image import PACKED_LIMIT, Resize
from data_shards.packing.shard_plan import ShardSize
from data_shards.packing.split import HoldoutList
from data_shards.sources import LabelList, Source


@dataclass(frozen=True)
class PackRequest:
    """Everything but the source and OUT; see `pack`."""

    labels: LabelList | None
    classes: Sequence[str] | None
    holdout: float | HoldoutList | None
    shard_size: ShardSize
    resize: Resize | None
    pixel_limit: PixelLimit
    unreadable: Literal["refuse", "skip"]
    duplicates: Literal["keep", "drop"]
    seed: int

    def __post_init__(self) -> None:
        if self.resize is not None and self.shard_size.num_bytes is not None:
            raise UserError(
                "shard_size: the size of reduced images is not known before; give samples_per_shard instead"
            )

    def as_json(self, source: Source) -> dict[str, object]:
        """For pack.json. New options are named only where used: a set packed before they came stays the same."""
        request: dict[str, object] = {
            "source": source.spec,
            "classes": None if self.classes is None else list(self.classes),
            "holdout": None if isinstance(self.holdout, HoldoutList) else self.holdout,
            "samples_per_shard": self.shard_size.samples,
            "seed": self.seed,
        }
        if isinstance(self.holdout, HoldoutList):
            request["holdout_list"] = f"{self.holdout.file.resolve()} ({self.holdout.digest})"
        if self.labels is not None:
            files = {name: str(value.resolve()) for name, value in vars(self.labels).items() if isinstance(value, Path)}
            request["labels"] = {**vars(self.labels), **files}
        if self.shard_size.num_bytes is not None:
            request["shard_size_bytes"] = self.shard_size.num_bytes
        if self.resize is not None:
            request["resize"] = asdict(self.resize)
        if self.pixel_limit != PACKED_LIMIT:
            request["max_image_pixels"] = self.pixel_limit.pixels
        if self.unreadable == "skip":
            request["unreadable"] = "skip"
        if self.duplicates == "drop":
            request["duplicates"] = "drop"
        return request
