"""Index the samples of a tar, so that one `pread` reads a sample without walking through the tar.

The index is kept beside the tar as NAME.idx, in the text form of DALI's `wds2idx` (v1.2: a header with the number of
samples, then a line each with "extension offset size member" for each part). Building takes one pass over the headers
(10 µs a sample), reading 5 µs a sample. Samples are grouped as in webdataset; only image and label are indexed.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_index import MOST_TAR_BYTES, ShardIndex, Texts, load_index
from shardvit.data_shards.shards.tar_walk import Member, TarDamage, walk_tar
from shardvit.data_shards.shards.webdataset_parts import split_name
from shardvit.data_shards.text import one_line
from shardvit.data_shards.vocabulary import LabelPart

ARRAY_EXTENSION = "npy"  # an image in samples that have no other
IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"})
_VERSION = "v1.2"


@dataclass(frozen=True)
class ReadableIndex:
    """The usable part of a tar; `damage` says what is wrong and at which byte, after which nothing is indexed."""

    index: ShardIndex  # of whole samples
    damage: str
    left_out: tuple[tuple[str, str], ...]  # (key, reason) of samples that lack an image or a label, or have several


def index_path(tar_path: Path | str) -> Path:
    """`a/b-000000.tar` -> `a/b-000000.idx`."""
    return Path(tar_path).with_suffix(".idx")


def build_index(tar_path: Path | str, *, label: LabelPart = "cls", name: str = "") -> ShardIndex:
    """Index a tar by walking its headers; `name` (or the path) is for messages.

    UserError if it is not a plain tar, is damaged or cut short, or a sample lacks exactly one image and one label.
    """
    readable = readable_index(tar_path, label=label, name=name)
    name = name or str(tar_path)
    if readable.damage:
        raise UserError(f"{name}: {readable.damage}; copy or pack it again")
    if readable.left_out:
        key, reason = readable.left_out[0]
        raise UserError(f"{name}: the sample {one_line(key)} {reason}; it needs one of each, next to each other")
    return readable.index


def readable_index(tar_path: Path | str, *, label: LabelPart = "cls", name: str = "") -> ReadableIndex:
    """Index the usable part of a tar that may be damaged; UserError only if it cannot be read."""
    try:
        descriptor = os.open(tar_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UserError(f"{name or tar_path}: there is no such tar") from None
    except OSError as error:
        raise UserError(f"{name or tar_path}: cannot be opened ({error.strerror})") from None
    try:
        return readable_open(descriptor, label=label)
    except OSError as error:
        raise UserError(f"{name or tar_path}: cannot be read ({error.strerror})") from None
    finally:
        os.close(descriptor)


def readable_open(descriptor: int, *, label: LabelPart) -> ReadableIndex:
    """Index the usable part of an open tar; OSError if it cannot be read."""
    members: list[Member] = []
    damage = ""
    try:
        for member in walk_tar(descriptor):
            members.append(member)
    except TarDamage as error:
        damage = str(error)
    return grouped(members, label=label, damage=damage)


def write_index(index: ShardIndex, path: Path | str, *, label: LabelPart = "cls") -> None:
    """Write the text form; UserError for a key with white space, which it cannot express."""
    lines = [f"{_VERSION} {len(index)}"]
    for i, key in enumerate(index.keys):
        if re.search(r"\s", key):
            raise UserError(f"{path}: the key {key!r} has white space in it, which an index cannot hold; rename it")
        image_offset, image_size, label_offset, label_size = index.places(i)
        parts = [(image_offset, image_size, index.image_extension[i]), (label_offset, label_size, label)]
        lines.append(" ".join(f"{ext} {offset} {size} {key}.{ext}" for offset, size, ext in sorted(parts)))
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_index(path: Path | str, *, label: LabelPart = "cls") -> ShardIndex:
    """Read an index: ours, DALI's or webdataset's in text, or .npz (made for one `label`); UserError if broken."""
    path = Path(path)
    try:
        if path.suffix == ".npz":
            return load_index(path)
        version, count, *fields = path.read_text(encoding="utf-8", errors="surrogateescape").split()
        if version != _VERSION or len(fields) % 4:
            raise ValueError(f"it should start with '{_VERSION}', and have four fields for each member")
        members = zip(fields[3::4], map(_place, fields[1::4]), map(_place, fields[2::4]), strict=True)
        found = grouped(map(Member._make, members), label=label)
        if int(count) != len(found.index) + len(found.left_out):
            raise ValueError(f"it should have the {count} samples that it starts with")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such index file; build it from the tar") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable index ({error}); delete it, and it is built again") from None
    if found.left_out:
        key, reason = found.left_out[0]
        raise UserError(f"{path}: the sample {one_line(key)} {reason}; delete the file, and it is built again")
    if not found.index.is_ascending:
        raise UserError(f"{path}: its samples are not in a tar's order; delete the file, and it is built again")
    return found.index


def open_index(
    tar_path: Path | str, *, label: LabelPart = "cls", index: Path | None = None, name: str = ""
) -> ShardIndex:
    """Read `index`, or the one beside the tar, else build it; UserError also if it points past the tar's end."""
    path = index_path(tar_path) if index is None else index
    if index is None and not path.is_file():
        return build_index(tar_path, label=label, name=name)
    found = read_index(path, label=label)
    try:
        num_bytes = os.stat(tar_path).st_size
    except FileNotFoundError:
        raise UserError(f"{name or tar_path}: there is no such tar") from None
    if found.end > num_bytes:
        raise UserError(f"{path}: this index is not that of {name or tar_path}; delete it, and it is built again")
    return found


def _place(text: str) -> int:
    if not text.isdigit() or len(text) > 20 or (number := int(text)) >= MOST_TAR_BYTES:
        raise ValueError(f"{text[:24]} is not an offset or size in a tar")
    return number


def grouped(members: Iterable[Member], *, label: LabelPart | None, damage: str = "") -> ReadableIndex:
    """Group members by key into samples, and take those with exactly one image and one label (None: no label)."""
    keys: list[str] = []
    images: list[list[tuple[str, int, int]]] = []  # per sample: extension, offset, size
    arrays: list[list[tuple[str, int, int]]] = []
    labels: list[list[tuple[int, int]]] = []
    for name, offset, size in members:
        if (split := split_name(name)) is None:
            continue
        key, extension = split
        if not keys or key != keys[-1]:
            keys.append(key)
            images.append([])
            arrays.append([])
            labels.append([])
        if extension == label:
            labels[-1].append((offset, size))
        elif extension in IMAGE_EXTENSIONS:
            images[-1].append((extension, offset, size))
        elif extension == ARRAY_EXTENSION:
            arrays[-1].append((extension, offset, size))
    images = [found or others for found, others in zip(images, arrays, strict=True)]
    counts, num_labels = [*zip(map(len, images), map(len, labels), strict=True)], int(label is not None)
    whole = [row for row, count in enumerate(counts) if count == (1, num_labels)]
    left_out = [
        (keys[row], f"has {count[0]} images" + (f" and {count[1]} .{label} members" if label else ""))
        for row, count in enumerate(counts)
        if count != (1, num_labels)
    ]
    if damage and left_out and left_out[-1][0] == keys[-1]:
        left_out.pop()  # cut through by the damage, which is reported anyway
    places = np.array([(*images[row][0][1:], *(labels[row] or [(0, 0)])[0]) for row in whole], dtype=np.int64)
    places = places.reshape(-1, 4)
    extensions = Texts.of(images[row][0][0] for row in whole)
    index = ShardIndex(Texts.of(keys[row] for row in whole), extensions, *np.ascontiguousarray(places.T))
    return ReadableIndex(index, damage, tuple(left_out))
