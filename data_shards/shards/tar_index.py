"""Index the samples of a tar, so that reading one is one `pread` instead of a walk through the tar.

The index is kept beside the tar as NAME.idx, in the text form of DALI's `wds2idx` (v1.2: a header with the number of
samples, then a line each with "extension offset size member" for each part). Building takes one pass over the headers
(10 µs a sample), reading 3 µs a sample. Samples are grouped as webdataset does; only image and label are indexed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_shards.errors import UserError
from data_shards.shards.shard_index import MOST_TAR_BYTES, ShardIndex, load_index
from data_shards.shards.tar_walk import TarDamage, walk_tar
from data_shards.shards.texts import Texts
from data_shards.shards.webdataset_parts import split_name
from data_shards.text import one_line
from data_shards.vocabulary import LabelPart

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"})
_VERSION = "v1.2"
_PLAIN_DIGITS = 18  # of a number that surely fits


@dataclass(frozen=True)
class ReadableIndex:
    """The usable part of a tar; `damage` says what is wrong and at which byte, and nothing after it is indexed."""

    index: ShardIndex  # of whole samples
    damage: str
    left_out: tuple[tuple[str, str], ...]  # (key, reason) of samples that lack an image or a label, or have several


class _Part(NamedTuple):
    extension: str
    offset: int
    size: int


_Sample = tuple[str, list[_Part]]


def index_path(tar_path: Path | str) -> Path:
    """`a/b-000000.tar` -> `a/b-000000.idx`."""
    return Path(tar_path).with_suffix(".idx")


def build_index(tar_path: Path | str, *, label: LabelPart = "cls", name: str = "") -> ShardIndex:
    """Index a tar by walking its headers; `label` is an extension, `name` (or the path) is for messages.

    Raises UserError if it is not a plain tar, is damaged or cut short (tarfile and webdataset silently drop the rest of
    such a tar), or holds a sample without exactly one image and one label.
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
    """Index the usable part of a tar that may be damaged; raises UserError only if it cannot be read."""
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
    """Index the usable part of an open tar; raises OSError if it cannot be read."""
    samples: list[_Sample] = []
    damage = ""
    last_key = None
    try:
        for name, offset, size in walk_tar(descriptor):
            if (split := split_name(name)) is None:
                continue
            if split[0] != last_key:
                last_key = split[0]
                samples.append((last_key, []))
            samples[-1][1].append(_Part(split[1], offset, size))
    except TarDamage as error:
        damage = str(error)
    whole, left_out = _chosen(samples, label=label)
    if damage and left_out and left_out[-1][0] == last_key:
        left_out.pop()  # what the damage cut through: the damage says it
    return ReadableIndex(_table(whole), damage, tuple(left_out))


def write_index(index: ShardIndex, path: Path | str, *, label: LabelPart = "cls") -> None:
    """Write the text form. Raises UserError for a key with white space, which the form cannot express."""
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
        # Not splitlines(): it cuts at characters that a key may hold.
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n").split("\n")
        version, count = lines[0].split()
        if version != _VERSION or int(count) != len(lines) - 1:
            raise ValueError(f"it should start with '{_VERSION}' and the number of lines that follow")
        plain = _plain_table(lines[1:], label=label)
        if plain is not None and plain.is_ascending:
            return plain
        whole, left_out = _chosen([_parse_line(line) for line in lines[1:]], label=label)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such index file; build it from the tar") from None
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{path}: not a readable index ({error}); delete it, and it is built again") from None
    if left_out:
        key, reason = left_out[0]
        raise UserError(f"{path}: the sample {one_line(key)} {reason}; delete the file, and it is built again")
    table = _table(whole)
    if not table.is_ascending:
        raise UserError(f"{path}: its samples are not in a tar's order; delete the file, and it is built again")
    return table


def open_index(
    tar_path: Path | str, *, label: LabelPart = "cls", index: Path | None = None, name: str = ""
) -> ShardIndex:
    """Read the index in the file `index` or beside the tar, else build one from the tar (and do not write it).

    Raises UserError as `read_index` and `build_index` do, and if the index points behind the tar's end.
    """
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


def _plain_table(lines: list[str], *, label: LabelPart) -> ShardIndex | None:
    """Parse an index in a third of the time if all lines have label and image alone, in one order; else None."""
    fields = " ".join(lines).split()
    if len(fields) != 8 * len(lines) or any(line.count(" ") != 7 for line in lines):
        return None
    first, last = ([fields[place::8] for place in range(start, start + 4)] for start in (0, 4))
    labels, images = (first, last) if set(first[0]) == {label} else (last, first)
    if set(labels[0]) != {label} or not IMAGE_EXTENSIONS.issuperset(images[0]):
        return None
    cut = len(label) + 1
    keys = [member[:-cut] for member in labels[3]]
    if [f"{key}.{label}" for key in keys] != labels[3]:
        return None
    if [f"{key}.{extension}" for key, extension in zip(keys, images[0], strict=True)] != images[3]:
        return None
    numbers = [number for part in (images, labels) for column in part[1:3] for number in column]
    if not "".join(numbers).isdecimal() or not "".join(numbers).isascii() or max(map(len, numbers)) > _PLAIN_DIGITS:
        return None
    table = np.array(list(map(int, numbers)), dtype=np.int64).reshape(4, -1)
    return ShardIndex(Texts.of(keys), Texts.of(images[0]), *table)


def _parse_line(line: str) -> _Sample:
    fields = line.split()
    if not fields or len(fields) % 4:
        raise ValueError(f"a line has {len(fields)} fields, not four per member")
    parts: list[_Part] = []
    keys: set[str] = set()
    for extension, offset, size, member in zip(fields[0::4], fields[1::4], fields[2::4], fields[3::4], strict=True):
        keys.add(member[: len(member) - len(extension) - 1])
        parts.append(_Part(extension.lower(), _place(offset, member), _place(size, member)))
    if len(keys) != 1:
        raise ValueError(f"one line with members of several samples: {line[:80]}")
    return keys.pop(), parts


def _place(text: str, member: str) -> int:
    if not text.isdigit() or len(text) > 20 or (number := int(text)) >= MOST_TAR_BYTES:
        raise ValueError(f"{text[:24]} is not an offset or size in a tar, for {member[:80]}")
    return number


def _chosen(
    samples: list[_Sample], *, label: LabelPart
) -> tuple[list[tuple[str, _Part, _Part]], list[tuple[str, str]]]:
    """(key, image, label) of each sample with exactly one of both, and (key, reason) of the others."""
    whole: list[tuple[str, _Part, _Part]] = []
    left_out: list[tuple[str, str]] = []
    for key, parts in samples:
        images = [part for part in parts if part.extension in IMAGE_EXTENSIONS]
        labels = [part for part in parts if part.extension == label]
        if len(images) == len(labels) == 1:
            whole.append((key, images[0], labels[0]))
        else:
            left_out.append((key, f"has {len(images)} images and {len(labels)} .{label} members"))
    return whole, left_out


def _table(samples: list[tuple[str, _Part, _Part]]) -> ShardIndex:
    positions = np.array([(*image[1:], *label[1:]) for _, image, label in samples], dtype=np.int64).reshape(-1, 4)
    keys, extensions = Texts.of(key for key, _, _ in samples), Texts.of(image.extension for _, image, _ in samples)
    return ShardIndex(keys, extensions, *np.ascontiguousarray(positions.T))
