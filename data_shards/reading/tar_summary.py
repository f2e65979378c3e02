"""Index one tar of another tool: the samples with a readable label; count and name the rest.

One pass over the headers and one small read per label: about 40 µs a sample, once. Image bytes are not read, so a
damaged image shows only on decoding. Runs in worker processes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.labels import LabelSpec, read_values
from shardvit.data_shards.shards.shard_index import MOST_TAR_BYTES, ShardIndex, load_note, save_index
from shardvit.data_shards.shards.tar_index import ARRAY_EXTENSION, IMAGE_EXTENSIONS, readable_index
from shardvit.data_shards.shards.tar_walk import Pread, TarDamage, walk_tar
from shardvit.data_shards.shards.webdataset_parts import split_name
from shardvit.data_shards.text import parse_json

_MOST_NAMED = 3  # left-out samples in a message
_PEEKED_MEMBERS = 64
_MOST_PEEKED_BYTES = 1 << 20  # of a JSON searched for label keys
_PIXELS_ROWS, _PIXELS_BYTES = 16, 1 << 16
_Count = Annotated[int, Field(ge=0, lt=MOST_TAR_BYTES)]


@dataclass(frozen=True)
class TarSummary:
    """The samples and damage found in a tar."""

    num_samples: _Count  # in its index
    num_bytes: _Count  # of the tar
    damage: str  # why reading stopped at some byte; "" if the tar is whole
    left_out: _Count  # samples found, but not in the index
    examples: tuple[str, ...]  # the first few left out: key and reason
    digest: str  # of keys, image sizes and labels
    pixels: str  # see `pixels_digest`; "" for a missing tar


@dataclass(frozen=True)
class FoundLabels:
    """The labels of one or several tars: numbers are below `numbers_below`, `num_values` counts numbers and names."""

    numbers_below: int = 0
    names: frozenset[str] = frozenset()
    num_values: int = 0

    @classmethod
    def of(cls, values: Sequence[Sequence[int | str]]) -> FoundLabels:
        """Summarise samples' labels."""
        numbers = (value for each in values for value in each if isinstance(value, int))
        names = frozenset(value for each in values for value in each if isinstance(value, str))
        return cls(1 + max(numbers, default=-1), names, sum(map(len, values)))

    def __or__(self, other: FoundLabels) -> FoundLabels:
        below = max(self.numbers_below, other.numbers_below)
        return FoundLabels(below, self.names | other.names, self.num_values + other.num_values)

    def __str__(self) -> str:
        if not self.names:
            return f"class numbers up to {self.numbers_below - 1:,}" if self.numbers_below else "no labels"
        numbers = f", and class numbers up to {self.numbers_below - 1:,}," if self.numbers_below else ""
        return f"{len(self.names):,} different names of classes ({min(self.names)[:40]!r}, ...){numbers}"


@dataclass(frozen=True)
class IndexedTar:
    """One tar's summary and labels, as in its index file."""

    facts: TarSummary
    labels: FoundLabels


_INDEXED = TypeAdapter(IndexedTar)


def index_tar(path: str, *, target: Path, labels: LabelSpec, name: str) -> IndexedTar:
    """Index a local tar into the .npz `target`, unless that exists: its name identifies the tar's content.

    UserError if the tar cannot be read, OSError if `target` cannot be written.
    """
    try:
        return _INDEXED.validate_json(load_note(target), strict=True)
    except FileNotFoundError:
        pass
    except ValueError:  # broken, or of another version
        target.unlink(missing_ok=True)
    readable = readable_index(path, label=labels.part, name=name)
    unlabelled: list[tuple[str, str]] = []
    try:
        num_bytes = os.stat(path).st_size
        with open(path, "rb", buffering=0) as tar:
            read = partial(os.pread, tar.fileno())
            good, values = read_labels(readable.index, read, labels=labels, left_out=unlabelled)
        index = readable.index.take(good)
        pixels = pixels_digest(path, index)
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    left_out = [f"{key!r} {reason}" for key, reason in readable.left_out]
    left_out += [f"{key!r}: {reason}" for key, reason in unlabelled]
    examples, digest = tuple(left_out[:_MOST_NAMED]), _digest(index, values)
    summary = TarSummary(len(index), num_bytes, readable.damage, len(left_out), examples, digest, pixels)
    indexed = IndexedTar(summary, FoundLabels.of(values))
    save_index(index, target, note=_INDEXED.dump_json(indexed).decode())
    return indexed


def pixels_digest(path: str, index: ShardIndex) -> str:
    """Digest the first bytes of 16 images, spread evenly over the tar; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as tar:
        for row in spread(len(index), most=_PIXELS_ROWS):
            size = min(int(index.image_size[row]), _PIXELS_BYTES)
            digest.update(os.pread(tar.fileno(), size, int(index.image_offset[row])))
    return digest.hexdigest()[:32]


def spread(count: int, *, most: int) -> list[int]:
    """Pick at most `most` of the numbers below `count`, evenly spread, including the first and last."""
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // max(1, most - 1) for number in range(most)]


def read_labels(
    index: ShardIndex, read: Pread, *, labels: LabelSpec, left_out: list[tuple[str, str]]
) -> tuple[list[int], list[list[int | str]]]:
    """Return the rows with a readable label, and their labels; add keys and reasons of others to `left_out`."""
    good: list[int] = []
    found: list[list[int | str]] = []
    places = zip(index.label_offset.tolist(), index.label_size.tolist(), strict=True)
    for row, (key, (offset, size)) in enumerate(zip(index.keys, places, strict=True)):
        try:
            values = read_values(read(size, offset), spec=labels)
            if (least := min((value for value in values if isinstance(value, int)), default=0)) < 0:
                raise ValueError(f"the label is {least}, which is no class number")
        except ValueError as error:
            left_out.append((key, str(error)))
            continue
        good.append(row)
        found.append(values)
    return good, found


def _digest(index: ShardIndex, values: list[list[int | str]]) -> str:
    digest = hashlib.sha256()
    for key, image_size, each in zip(index.keys, index.image_size.tolist(), values, strict=True):
        digest.update(f"{key!r} {image_size} {each!r}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def peek(read: Pread, num_bytes: int) -> tuple[set[str], list[str]]:
    """Find the parts of a tar's first samples, and which could be labels, in `LabelSpec.parse`'s notation."""
    parts: set[str] = set()
    keys: dict[str, None] = {}
    with suppress(TarDamage):  # indexing reports it
        for member in islice(walk_tar(read, end=num_bytes), _PEEKED_MEMBERS):
            if (split := split_name(member.name)) is None:
                continue
            parts.add(split[1])
            if split[1] == "json" and member.size <= _MOST_PEEKED_BYTES:
                keys |= dict.fromkeys(_label_keys(read(member.size, member.offset)))
    suggestions = [part for part in ("cls", "txt") if part in parts] + [f"json:{key}" for key in keys]
    return {"image" if part in IMAGE_EXTENSIONS or part == ARRAY_EXTENSION else part for part in parts}, suggestions


def _label_keys(content: bytes) -> list[str]:
    try:
        table = parse_json(content)
    except ValueError:
        return []
    found: list[str] = []
    for key, value in table.items() if isinstance(table, dict) else ():
        inner = value.items() if isinstance(value, dict) else ()
        found += [key] if _may_be_label(value) else []
        found += [f"{key}.{name}" for name, one in inner if _may_be_label(one)]
    return found


def _may_be_label(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, int | str) and not isinstance(one, bool) for one in values)
