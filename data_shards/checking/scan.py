"""One shard, or a part of its samples, looked at as closely as can be: what is in it, and what is wrong with it.

The tar's own headers are the truth here; the index beside it, the manifest's numbers and the digest are compared with
them. Every image is read and hashed (16 bytes are kept of it), with `decode` every one is decoded in full. Costs about
25 us a small image and the disk's or SHA-256's time for large ones; decoding comes on top (1.9 ms a photograph).
Damage never raises: it is what is looked for. Which of it matters how much is not judged here (see `findings`).
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_shards.checking.findings import Kind
from data_shards.errors import UnreadableImage, UserError
from data_shards.images.decode import PixelLimit, read_image
from data_shards.labels import parse_label
from data_shards.shard_set import ShardEntry, ShardSet
from data_shards.store.location import is_local, local_path
from data_shards.store.store import Store
from data_shards.tars.shard_index import ShardIndex
from data_shards.tars.tar_index import ReadableIndex, index_path, read_index, readable_index

MOST_NAMED = 1000  # faults of one kind that a part names; the rest is only counted

_MAGIC = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
}


@dataclass(frozen=True)
class ScanRequest:
    """What all parts of all shards have in common; goes to every worker once."""

    shards: ShardSet
    store: Store
    decode: bool
    digests: bool
    pixel_limit: PixelLimit


class Part(NamedTuple):
    """Part `number` of the `parts` that the samples of shard `shard` are cut into."""

    shard: int
    number: int
    parts: int


class Fault(NamedTuple):
    """One thing that is wrong; `key` is "" where it is the shard as a whole."""

    kind: Kind
    key: str
    reason: str


@dataclass
class PartScan:
    """What was found in one part; arrays have shape [samples], samples that are lost are not in them."""

    part: Part
    faults: list[Fault] = field(default_factory=list)
    fault_counts: Counter[Kind] = field(default_factory=Counter)
    num_bytes: int | None = None  # of the tar; part 0 only
    packed_keys: bytes = b""
    key_hash: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    image_hash: NDArray[np.uint64] = field(default_factory=lambda: np.empty((0, 2), np.uint64))  # [samples, 2]
    label_code: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # equal for equal labels
    is_whole: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))  # image and label are usable
    image_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    heights: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # of those decoded
    widths: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    class_counts: Counter[int] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    decode_seconds: float = 0.0

    @property
    def num_samples(self) -> int:
        return len(self.key_hash)

    @property
    def keys(self) -> list[str]:
        """Kept compressed: a data set has many."""
        text = zlib.decompress(self.packed_keys) if self.packed_keys else b""
        return text.decode("utf-8", "surrogateescape").split("\0") if self.num_samples else []

    def add_fault(self, kind: Kind, reason: str, *, key: str = "", count: int = 1) -> None:
        """Count a fault, and name it unless there are very many."""
        self.fault_counts[kind] += count
        if sum(fault.kind == kind for fault in self.faults) < MOST_NAMED:
            self.faults.append(Fault(kind, key, reason))


def scan_part(request: ScanRequest, part: Part) -> PartScan:
    """Look at one part; part 0 also at the shard as a whole."""
    entry = request.shards.shards[part.shard]
    scan = PartScan(part)
    is_first = part.number == 0
    try:
        if is_local(entry.url) and not local_path(entry.url).exists():
            if is_first:
                scan.add_fault("missing-shard", _lost(entry.num_samples) or "it is not there")
            return scan
        descriptor = request.store.open_file(entry)
    except UserError as error:
        if is_first:
            reason = str(error).removeprefix(entry.name).lstrip(": ")
            scan.add_fault("unreachable-shard", "; ".join(filter(None, [reason, _lost(entry.num_samples)])))
        return scan
    try:
        path = str(local_path(entry.url)) if is_local(entry.url) else f"/dev/fd/{descriptor}"
        readable = readable_index(path, label=entry.labels.part, name=entry.name)
        index = _usable_index(entry, readable, scan=scan if is_first else None, descriptor=descriptor)
        if is_first:
            _scan_whole(request, entry, readable, index, descriptor=descriptor, scan=scan)
        start, stop = (len(index) * number // part.parts for number in (part.number, part.number + 1))
        with warnings.catch_warnings(action="ignore"):  # Pillow's, of large images and odd metadata
            _scan_samples(request, entry, index, range(start, stop), descriptor=descriptor, scan=scan)
    except (OSError, UserError) as error:
        reason = str(error).removeprefix(entry.name).lstrip(": ")
        scan.add_fault("damaged-shard", f"{reason}; the rest of its samples was not checked")
    finally:
        os.close(descriptor)
    return scan


def _scan_whole(
    request: ScanRequest,
    entry: ShardEntry,
    readable: ReadableIndex,
    index: ShardIndex,
    *,
    descriptor: int,
    scan: PartScan,
) -> None:
    """The tar against what is said of it; one damage shows in several ways, and is told once."""
    scan.num_bytes = os.fstat(descriptor).st_size
    told = []
    if entry.num_bytes is not None and scan.num_bytes != entry.num_bytes:
        told.append(f"it has {scan.num_bytes:,} bytes where the manifest says {entry.num_bytes:,}")
    if readable.damage:
        told.append(readable.damage)
    if told:
        told.append(_lost(entry.num_samples - len(index)))
        scan.add_fault("damaged-shard", "; ".join(filter(None, told)))
    elif request.digests and entry.sha256 and (found := _sha256(descriptor)) != entry.sha256:
        scan.add_fault("digest", f"it has {found[:12]}..., the manifest says {entry.sha256[:12]}...")
    for key, reason in readable.left_out:
        scan.add_fault("incomplete-sample", reason, key=key)
    is_stated = entry.index is None  # by a manifest
    num_found = len(index) + len(readable.left_out)
    if is_stated and not told and num_found != entry.num_samples:
        scan.add_fault("sample-count", f"{num_found:,} where {entry.num_samples:,} are stated")


def _usable_index(entry: ShardEntry, readable: ReadableIndex, *, scan: PartScan | None, descriptor: int) -> ShardIndex:
    """The headers' index; or the one beside the tar, where that knows of samples behind the damage."""
    if entry.index is not None or not is_local(entry.url):  # made from the tar on this machine
        return readable.index
    path = index_path(local_path(entry.url))
    if not path.is_file():
        return readable.index
    num_known = len(readable.index)
    if not num_known and readable.damage:
        return readable.index  # it may be any file
    try:
        stored = read_index(path, label=entry.labels.part)
    except UserError as error:
        if scan is not None:
            scan.add_fault("index", str(error).partition("; delete")[0].removeprefix(f"{path}: "))
        return readable.index
    difference = _difference(stored, readable.index)
    if difference or (len(stored) != num_known and not readable.damage):
        if scan is not None:
            scan.add_fault(
                "index", difference or f"{path.name} lists {len(stored):,} samples, the tar's headers {num_known:,}"
            )
        return readable.index
    if len(stored) <= num_known:
        return readable.index
    ends = np.maximum(stored.image_offset + stored.image_size, stored.label_offset + stored.label_size)
    rows = np.flatnonzero(ends <= os.fstat(descriptor).st_size)
    columns = (stored.image_offset, stored.image_size, stored.label_offset, stored.label_size)
    keys, extensions = list(stored.keys), list(stored.image_extension)
    return ShardIndex([keys[i] for i in rows], [extensions[i] for i in rows], *(column[rows] for column in columns))


def _difference(stored: ShardIndex, headers: ShardIndex) -> str:
    """In which sample two indexes differ first, as far as both go; "" if they do not."""
    both = min(len(stored), len(headers))
    same = np.array([a == b for a, b in zip(stored.keys, headers.keys, strict=False)], dtype=bool)
    for column in ("image_offset", "image_size", "label_offset", "label_size"):
        same &= getattr(stored, column)[:both] == getattr(headers, column)[:both]
    if same.all():
        return ""
    row = int(np.argmin(same))
    return f"from sample {row:,} on, {stored.keys[row]!r} in the index, it differs from the tar's headers"


def _scan_samples(
    request: ScanRequest, entry: ShardEntry, index: ShardIndex, rows: range, *, descriptor: int, scan: PartScan
) -> None:
    num_samples = len(rows)
    keys = list(index.keys[rows.start : rows.stop])
    scan.packed_keys = zlib.compress("\0".join(keys).encode("utf-8", "surrogateescape"), 1)
    hashed = [_hash(key.encode("utf-8", "surrogateescape")) for key in keys]
    scan.key_hash = np.frombuffer(b"".join(hashed), np.uint64).reshape(-1, 2)[:, 0].copy()
    scan.image_bytes = index.image_size[rows.start : rows.stop].copy()
    scan.label_code = np.full(num_samples, -1, np.int64)
    scan.is_whole = np.zeros(num_samples, np.bool_)
    scan.image_hash = np.zeros((num_samples, 2), np.uint64)
    shards, label_map = request.shards, request.shards.label_map
    sizes: list[tuple[int, int]] = []
    for i, row in enumerate(rows):
        label = os.pread(descriptor, int(index.label_size[row]), int(index.label_offset[row]))
        data = os.pread(descriptor, int(index.image_size[row]), int(index.image_offset[row]))
        scan.image_hash[i] = np.frombuffer(_hash(data), np.uint64)
        is_readable = _look_at(data, request=request, key=keys[i], sizes=sizes, scan=scan)
        try:
            labels = parse_label(label, spec=entry.labels, label_map=label_map, num_classes=shards.num_classes)
        except ValueError as error:
            scan.add_fault("label", str(error), key=keys[i])
            continue
        scan.class_counts.update(labels)
        scan.label_code[i] = _code(labels)
        scan.is_whole[i] = is_readable
    scan.heights = np.array([height for height, _ in sizes], np.int32)
    scan.widths = np.array([width for _, width in sizes], np.int32)


def _look_at(data: bytes, *, request: ScanRequest, key: str, sizes: list[tuple[int, int]], scan: PartScan) -> bool:
    """Whether an image is one; decoded only if asked for."""
    image_format = _format(data)
    if not data or (image_format is None and not request.decode):
        scan.add_fault("image", "it is of no format that is known" if data else "it is empty", key=key)
        return False
    if request.decode:
        start = time.process_time()
        try:
            image = read_image(data, limit=request.pixel_limit)
            mended = _decode(data, image_format, image.pixels)
        except UnreadableImage as error:
            scan.add_fault("image", str(error), key=key)
            return False
        scan.decode_seconds += time.process_time() - start
        sizes.append((image.height, image.width))
        if mended:
            scan.add_fault("mended-image", mended, key=key)
    scan.formats[image_format or "another"] += 1
    return True


def _decode(data: bytes, image_format: str | None, decode: Callable[[], object]) -> str:
    """Decode all of an image; what the decoder complains of and goes on after all the same, "" if nothing.

    Raises:
        UnreadableImage: it cannot be decoded.
    """
    if image_format == "JPEG":
        import simplejpeg

        try:
            simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
            return ""
        except ValueError as error:  # CMYK, which it does not know, among others
            complaint = str(error)
        decode()
        return complaint if re.search("corrupt|premature", complaint, re.IGNORECASE) else ""
    decode()
    return ""


def _format(data: bytes) -> str | None:
    """By the first bytes; None where they are of no image format that is trained on."""
    for magic, name in _MAGIC.items():
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis"):
        return "AVIF"
    return "PPM" if data[:1] == b"P" and data[1:2] in b"123456" and data[2:3].isspace() else None


def _hash(data: bytes) -> bytes:
    """16 bytes; SHA-256 has instructions of its own on today's CPUs, BLAKE2 takes twice as long."""
    return hashlib.sha256(data).digest()[:16]


def _code(labels: tuple[int, ...]) -> int:
    """The label itself where there is one; else a number that is equal for equal sets."""
    if len(labels) == 1:
        return labels[0]
    return int.from_bytes(_hash(repr(sorted(labels)).encode())[:8], "little") >> 1 | 1 << 62


def _sha256(descriptor: int) -> str:
    digest = hashlib.sha256()
    start = 0
    while block := os.pread(descriptor, 1 << 20, start):
        digest.update(block)
        start += len(block)
    return digest.hexdigest()


def _lost(num_samples: int) -> str:
    return f"{num_samples:,} samples are lost" if num_samples > 0 else ""
