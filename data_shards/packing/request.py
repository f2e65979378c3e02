"""Check the options of `shardvit pack`, and format them for pack.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.packing.image import PACKED_LIMIT, Resize
from shardvit.data_shards.packing.sources.label_list import LabelList, at_line, clean_path, read_lines
from shardvit.data_shards.packing.sources.recognise import Published
from shardvit.data_shards.packing.sources.tars.samples import SampleOptions
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import parse_json
from shardvit.data_shards.vocabulary import MOST_CHANNELS

if TYPE_CHECKING:
    from shardvit.data_shards.checking.near_duplicates.matches import Matches

DEFAULT_SAMPLES_PER_SHARD = 1000  # ImageNet: about 110 MB a shard; object stores prefer 0.1 to 1 GB


@dataclass(frozen=True)
class Exclusion:
    """Sets whose images are left out of train; `store` fetches remote ones, `show` writes the page."""

    sets: tuple[ShardSet, ...]
    store: Store
    show: Callable[[Path, Sequence[Matches], PixelLimit], None] | None = None


class HoldoutList(NamedTuple):
    """Images to hold out: {path, spelt as in `ImageSet.trace`: line of `file`}."""

    file: Path
    lines: dict[str, int]

    def __str__(self) -> str:
        digest = hashlib.sha256("\n".join(sorted(self.lines)).encode()).hexdigest()[:16]
        return f"{self.file.resolve()} ({digest})"


def read_holdout_list(file: Path, *, root: Path | None) -> HoldoutList:
    """Read a list of paths below `root` (None: a URL), one a line; UserError if it is malformed or empty."""
    lines: dict[str, int] = {}
    for line, text in read_lines(file):
        with at_line(file, line):
            lines.setdefault(clean_path(text, root=root), line)
    if not lines:
        raise UserError(f"{file}: it names no image; write the path of one on each line")
    return HoldoutList(file, lines)


@dataclass(frozen=True)
class PackRequest:
    """All options but SOURCE and OUT; UserError for contradictions."""

    name: str | None = None  # of the set; default: OUT's name
    labels: LabelList | None = None  # replaces the names of class folders
    published: Published = field(default_factory=Published)
    samples: SampleOptions = field(default_factory=SampleOptions)
    classes: Sequence[str] | None = None  # pack these only, labelled 0, 1, ... in this order
    # Refuse or keep names that differ only by case or blanks, and a lone class of several folders.
    doubtful_classes: Literal["refuse", "keep"] = "refuse"
    # What becomes val: a fraction of each class (of all images if multi-label), a number regardless of class (51,200 of
    # ImageNet-21k in Google's code), or a list.
    holdout: float | None = None
    holdout_images: int | None = None
    holdout_list: HoldoutList | None = None
    samples_per_shard: int | None = None  # most images in a tar; default 1000, unless `shard_size_bytes` is given
    shard_size_bytes: int | None = None  # most bytes of a tar, to within one image
    resize: Resize | None = None
    pixel_limit: PixelLimit = PACKED_LIMIT  # larger images count as unreadable
    unreadable: Literal["refuse", "skip"] = "refuse"  # refuse after reading all images, or list and leave out
    duplicates: Literal["keep", "drop"] = "keep"  # drop: keep the first of equal files, train before val
    exclusion: Exclusion | None = None
    existing: Literal["refuse", "append"] = "refuse"  # an OUT of another request
    reread: Literal["changed", "all"] = "changed"  # if OUT exists: compare the bytes of changed images, or of all
    channels: int | None = None  # of every image, read as they are; None: any image, as colours of 8 bits
    seed: int = 0  # of shuffle and holdout

    def __post_init__(self) -> None:
        if self.name is not None and not (self.name.strip() and self.name.isprintable()):
            raise UserError(f"name: {self.name!a} cannot be written; give letters or digits")
        for names in (("holdout", "holdout_images", "holdout_list"), ("samples_per_shard", "shard_size_bytes")):
            if sum(getattr(self, name) is not None for name in names) > 1:
                flags = ", ".join(f"--{name.removesuffix('_bytes').replace('_', '-')}" for name in names)
                raise UserError(f"{flags}: give one of them, not both")
        if self.samples_per_shard is None and self.shard_size_bytes is None:
            object.__setattr__(self, "samples_per_shard", DEFAULT_SAMPLES_PER_SHARD)
        for name in ("holdout_images", "samples_per_shard", "shard_size_bytes"):
            if (number := getattr(self, name)) is not None and number < 1:
                flag = f"--{name.removesuffix('_bytes').replace('_', '-')}"
                raise UserError(f"{flag}: must be at least 1, not {number}")
        if self.channels is not None and not 1 <= self.channels <= MOST_CHANNELS:
            raise UserError(f"--channels: must be from 1 to {MOST_CHANNELS}, not {self.channels}")
        if self.channels is not None and self.resize is not None:
            raise UserError("--resize-short: reduced images are JPEGs, in colour; leave it out with --channels")
        if self.resize is not None and self.shard_size_bytes is not None:
            raise UserError("shard_size: the size of reduced images is not known yet; give samples_per_shard instead")

    def as_json(self, source: str) -> dict[str, object]:
        """Format for pack.json; `source` is its `spec`. Defaults are left out, so a new option changes no request."""
        val, val_labels, cifar_labels = vars(self.published).values()
        given: dict[str, object] = {
            "name": self.name,
            "holdout_list": str(self.holdout_list) if self.holdout_list else None,
            "labels": self.labels.as_json() if self.labels else None,
            "samples": self.samples.as_json(),
            "val": str(val.resolve()) if val else None,
            "val_labels": str(val_labels.resolve()) if val_labels else None,
            "cifar_labels": cifar_labels if cifar_labels != "fine" else None,
            "holdout_images": self.holdout_images,
            "shard_size_bytes": self.shard_size_bytes,
            "resize": asdict(self.resize) if self.resize else None,
            "max_image_pixels": self.pixel_limit.pixels if self.pixel_limit != PACKED_LIMIT else None,
            "channels": self.channels,
            "unreadable": self.unreadable if self.unreadable == "skip" else None,
            "without_matches_of": [each.digest for each in self.exclusion.sets] if self.exclusion else None,
            "duplicates": self.duplicates if self.duplicates == "drop" else None,
        }
        return {
            "source": source,
            "classes": None if self.classes is None else list(self.classes),
            "holdout": self.holdout,
            "samples_per_shard": self.samples_per_shard,
            "seed": self.seed,
            **{name: value for name, value in given.items() if value is not None},
        }


def difference(before: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """Say what differs between two requests, if anything."""
    request = parse_json(json.dumps(request))
    key = next((key for key in {**request, **before} if before.get(key) != request.get(key)), None)
    return "" if key is None else f"{key}: {before.get(key)!r} then, {request.get(key)!r} now"
