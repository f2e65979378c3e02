"""Which image goes into which shard, under which key and label: pure, decided before a byte is written.

Shuffling and holding out are done by sorting on a hash of (seed, purpose, where the image is from). So they
depend on neither numpy's version nor the number of cores, and an image stays in train or val whether all
classes are packed or some, as long as its class has the same images. Costs about 2 us per image.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError
from data_shards.sources import ImageSet, Source
from data_shards.sources.base import SplitName


@dataclass(frozen=True)
class ShardPlan:
    """One tar to be: images `indices` of `images`, in this order, with labels counted in the packed
    classes.
    """

    file: str
    images: ImageSet
    indices: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    first_number: int

    def __len__(self) -> int:
        return len(self.indices)

    def key(self, position: int) -> str:
        """The key of the sample at `position` of this shard."""
        index = int(self.indices[position])
        name = self.classes[self.labels[position]]
        return sample_key(name, self.images.trace(index), self.first_number + index)


@dataclass(frozen=True)
class PackPlan:
    """All shards of all splits; `classes[label]` is the name of a label."""

    classes: tuple[str, ...]
    splits: dict[SplitName, list[ShardPlan]]

    @property
    def num_images(self) -> int:
        return sum(len(shard) for shards in self.splits.values() for shard in shards)


def make_plan(
    source: Source, *, classes: Sequence[str] | None, holdout: float | None, samples_per_shard: int, seed: int
) -> PackPlan:
    """Choose classes, hold out, shuffle, cut into shards.

    Shards of a split differ by one sample at most, so no worker gets a tiny one. Raises UserError for unknown
    or repeated classes, a holdout outside (0, 1), a holdout of a source that has a val split, and a class
    left without an image in some split.
    """
    if samples_per_shard < 1:
        raise UserError(f"samples_per_shard: must be at least 1, not {samples_per_shard}")
    chosen = _choose_classes(source, classes)
    new_label = np.full(len(source.classes), -1, dtype=np.int64)
    new_label[[source.classes.index(name) for name in chosen]] = np.arange(len(chosen))
    parts: dict[SplitName, NDArray[np.int64]] = {}
    for split, images in source.splits.items():
        parts[split] = np.flatnonzero(new_label[images.labels] >= 0)
    if holdout is not None:
        parts = _hold_out(source, parts["train"], holdout, seed)
    plans: dict[SplitName, list[ShardPlan]] = {}
    for split, indices in parts.items():
        images = source.splits["train" if holdout is not None else split]
        labels = new_label[images.labels[indices]]
        counts = np.bincount(labels, minlength=len(chosen))
        if not counts.all():
            raise UserError(
                f"{source.spec}: the class {chosen[int(counts.argmin())]!r} has no image in split {split}; "
                f"leave it out with `classes`"
            )
        # Neighbours in a source are of one class; a shard, and so a shuffle window, should hold all of them.
        order = _hash_order(images, indices, f"shuffle-{split}", seed)
        first_number = 0 if images is source.splits["train"] else len(source.splits["train"])
        num_shards = -(-len(order) // samples_per_shard)
        plans[split] = [
            ShardPlan(
                file=f"{file_name(source.name)}-{split}-{number:06d}.tar",
                images=images,
                indices=indices[piece],
                labels=labels[piece],
                classes=chosen,
                first_number=first_number,
            )
            for number, piece in enumerate(np.array_split(order, num_shards))
        ]
    return PackPlan(classes=chosen, splits=plans)


def sample_key(class_name: str, trace: str, number: int) -> str:
    """`cat`, `train/cat/0338.jpg`, 42 -> `cat_0338_0000042`: readable, unique by its number, and safe in a
    tar.

    webdataset cuts keys at the first dot, DALI's index at spaces, and tar (ustar) limits names to 100 bytes.
    The number counts the images of the whole source, so an image keeps its key whichever classes are packed.
    """
    stem = trace.rpartition("/")[2].rpartition(".")[0] or trace.rpartition("/")[2]
    return f"{file_name(class_name)[:32]}_{_safe(stem)[:40]}_{number:07d}"


def file_name(name: str) -> str:
    """`name` with everything but ASCII letters, digits, - and _ replaced; never empty, never starting with _
    or -.
    """
    return _safe(name).lstrip("_-") or "x"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)


def _choose_classes(source: Source, classes: Sequence[str] | None) -> tuple[str, ...]:
    if classes is None:
        return source.classes
    if not classes:
        raise UserError("classes: the list is empty; name at least one class or leave it out for all of them")
    for name in classes:
        if name not in source.classes:
            near = get_close_matches(name, source.classes, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(source.classes[:20])}"
            raise UserError(f"classes: {source.spec} has no class {name!r}; {hint}")
    if len(set(classes)) != len(classes):
        twice = next(name for i, name in enumerate(classes) if name in classes[:i])
        raise UserError(f"classes: {twice!r} is named twice; name each class once")
    return tuple(classes)


def _hold_out(
    source: Source, indices: NDArray[np.int64], fraction: float, seed: int
) -> dict[SplitName, NDArray[np.int64]]:
    """Of each class the nearest whole number of images to `fraction`, but at least one, become split val."""
    if "val" in source.splits:
        raise UserError(f"holdout: {source.spec} has a held-out split already; leave holdout out")
    if not 0 < fraction < 1:
        raise UserError(f"holdout: must lie between 0 and 1 (a fraction of each class), not {fraction}")
    images = source.splits["train"]
    held: list[NDArray[np.int64]] = []
    for label in np.unique(images.labels[indices]):
        members = indices[images.labels[indices] == label]
        if len(members) < 2:
            raise UserError(
                f"holdout: the class {source.classes[label]!r} of {source.spec} has one image only, so "
                f"none can be held out; add images or leave the class out"
            )
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        held.append(members[_hash_order(images, members, "holdout", seed)[:count]])
    val = np.sort(np.concatenate(held))
    return {"train": np.setdiff1d(indices, val, assume_unique=True), "val": val}


def _hash_order(images: ImageSet, indices: NDArray[np.int64], purpose: str, seed: int) -> NDArray[np.int64]:
    """A permutation of range(len(indices)): the order of their hashes."""
    prefix = f"{seed}\0{purpose}\0".encode()
    hashes = [
        hashlib.blake2b(prefix + images.trace(int(i)).encode(errors="surrogateescape"), digest_size=16).digest()
        for i in indices
    ]
    return np.array(sorted(range(len(hashes)), key=hashes.__getitem__), dtype=np.int64)
