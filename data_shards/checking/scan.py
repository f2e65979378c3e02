"""Scan a shard, or a part of its samples. Damage is recorded, never raised; `findings` grades it.

The tar's headers are the truth; the index, the manifest and the digest are compared with them. Every image is read and
hashed (16 bytes are kept), and with `decode` decoded in full. Takes about 25 us a small image, disk or SHA-256 speed
for large ones, and 1.9 ms to decode a photograph.
"""

import hashlib
import os
import re
import time
import warnings
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.checking.findings import MOST_PLACES, FoundAt
from shardvit.data_shards.errors import UnreadableImage, UserError
from shardvit.data_shards.images.channels import open_to_look
from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.images.decode import USUAL_LIMIT, PixelLimit
from shardvit.data_shards.sets.statistics import SampleStatistics, image_statistics, to_parquet
from shardvit.data_shards.shards.holdout import index_of, rows_of
from shardvit.data_shards.shards.labels import parse_label
from shardvit.data_shards.shards.location import is_local, local_path
from shardvit.data_shards.shards.shard_index import ShardIndex
from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet
from shardvit.data_shards.shards.tar_index import ReadableIndex, index_path, read_index, readable_index
from shardvit.data_shards.store.store import Store

_FORMATS = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WebP": rb"RIFF....WEBP",
    "GIF": rb"GIF8",
    "BMP": rb"BM",
    "TIFF": rb"II\*\0|MM\0\*",
    "JPEG 2000": rb"\0\0\0\x0cjP  ",
    "AVIF": rb"....ftypavi[fs]",
    "PPM": rb"P[1-6]\s",
    "npy": rb"\x93NUMPY",
}
_MAGIC = {name: re.compile(pattern, re.DOTALL) for name, pattern in _FORMATS.items()}

SAMPLE = np.dtype(
    [
        ("key_hash", np.uint64),
        ("image_hash", np.uint64, 2),
        ("label_code", np.int64),  # equal for equal labels; -1: unusable
        ("is_whole", np.bool_),  # image and label are usable
        ("image_bytes", np.int64),
        ("height", np.int32),  # 0: not decoded
        ("width", np.int32),
    ]
)


@dataclass(frozen=True)
class CheckOptions:
    """Depth of the check, and the training setup to assess the shards for."""

    decode: bool = False  # every image in full, unless it has more pixels than `pixel_limit`
    statistics: bool = False  # of every image, with `decode`
    digests: bool = True  # compare every shard's SHA-256 with the manifest
    pixel_limit: PixelLimit = USUAL_LIMIT
    world_size: int | None = None  # None: do not assess fitness
    lanes: int | None = None
    processes_per_node: int = 8


class ScanRequest(NamedTuple):
    """Shared by all parts; sent to every worker once."""

    shards: ShardSet
    store: Store
    options: CheckOptions


class ShardPart(NamedTuple):
    """Part `number` of the `parts` into which a shard's samples are cut."""

    shard: int
    number: int
    parts: int


@dataclass
class PartScan:
    """Findings in one part; lost samples are not in `samples`."""

    part: ShardPart
    faults: dict[str, list[FoundAt]] = field(default_factory=lambda: defaultdict(list))  # by kind; shards not named yet
    fault_counts: Counter[str] = field(default_factory=Counter)
    num_bytes: int | None = None  # of the tar; part 0 only
    samples: NDArray[Any] = field(default_factory=lambda: np.empty(0, SAMPLE))
    packed_keys: bytes = b""
    class_counts: Counter[int] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    decode_seconds: float = 0.0
    statistics: bytes = b""  # see `to_parquet`

    @property
    def keys(self) -> list[str]:
        text = zlib.decompress(self.packed_keys) if self.packed_keys else b""
        return text.decode("utf-8", "surrogateescape").split("\0") if len(self.samples) else []

    def add_fault(self, kind: str, reason: str, *, key: str = "") -> None:
        self.fault_counts[kind] += 1
        if len(self.faults[kind]) < MOST_PLACES:
            self.faults[kind].append(FoundAt("", key, reason))


def scan_part(request: ScanRequest, part: ShardPart) -> PartScan:
    """Scan one part; part 0 also checks the shard as a whole."""
    entry = request.shards.shards[part.shard]
    scan = PartScan(part)
    is_first = part.number == 0
    try:
        if is_local(entry.url) and not local_path(entry.url).exists():
            if is_first:
                scan.add_fault("missing-shard", _and_lost("", entry.num_samples) or "it is not there")
            return scan
        descriptor = request.store.open_file(entry)
    except UserError as error:
        if is_first:
            scan.add_fault("unreachable-shard", _and_lost(_reason(error, entry), entry.num_samples))
        return scan
    try:
        path = str(local_path(entry.url)) if is_local(entry.url) else f"/dev/fd/{descriptor}"
        readable = readable_index(path, label=entry.labels.part, name=entry.name)
        index, complaint = _usable_index(entry, readable, tar_bytes=os.fstat(descriptor).st_size)
        if is_first:
            scan.num_bytes = os.fstat(descriptor).st_size
            if complaint:
                scan.add_fault("index", complaint)
            _check_whole(entry, readable, index, path=path if request.options.digests else None, scan=scan)
        index = index_of(entry.subset, index)
        start, stop = (len(index) * number // part.parts for number in (part.number, part.number + 1))
        with warnings.catch_warnings(action="ignore"):  # Pillow's, about large images and odd metadata
            _scan_samples(request, entry, index, range(start, stop), descriptor=descriptor, scan=scan)
    except (OSError, UserError) as error:
        scan.add_fault("damaged-shard", f"{_reason(error, entry)}; the rest of its samples was not checked")
    finally:
        os.close(descriptor)
    return scan


def _check_whole(
    entry: ShardEntry, readable: ReadableIndex, index: ShardIndex, *, path: str | None, scan: PartScan
) -> None:
    """Compare the tar with the manifest, and its digest if `path` is given; each damage is reported once."""
    damage = readable.damage
    if entry.num_bytes is not None and scan.num_bytes != entry.num_bytes:
        sizes = f"it has {scan.num_bytes:,} bytes where the manifest says {entry.num_bytes:,}"
        damage = f"{sizes}; {damage}" if damage else sizes
    if damage:
        scan.add_fault("damaged-shard", _and_lost(damage, entry.num_samples - len(index_of(entry.subset, index))))
    elif path is not None and entry.sha256:
        with open(path, "rb", buffering=0) as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != entry.sha256:
            scan.add_fault("digest", f"it has {found[:12]}..., the manifest says {entry.sha256[:12]}...")
    for key, reason in readable.left_out:
        scan.add_fault("incomplete-sample", reason, key=key)
    num_found = len(index) + len(readable.left_out)
    is_stated = entry.index is None  # by a manifest
    if is_stated and not damage and num_found != entry.stored_samples:
        scan.add_fault("sample-count", f"{num_found:,} where {entry.stored_samples:,} are stated")


def _usable_index(entry: ShardEntry, readable: ReadableIndex, *, tar_bytes: int) -> tuple[ShardIndex, str]:
    """Take the headers' index, or the stored one if it lists samples behind damage; return the stored one's fault."""
    headers = readable.index
    if entry.index is not None or not is_local(entry.url):  # made from the tar on this machine
        return headers, ""
    path = index_path(local_path(entry.url))
    if not path.is_file() or (readable.damage and not len(headers)):  # without headers it may be any file
        return headers, ""
    try:
        stored = read_index(path, label=entry.labels.part)
    except UserError as error:
        return headers, str(error).partition("; delete")[0].removeprefix(f"{path}: ")
    if difference := _difference(stored, headers):
        return headers, difference
    if len(stored) != len(headers) and not readable.damage:
        return headers, f"{path.name} lists {len(stored):,} samples, the tar's headers {len(headers):,}"
    if len(stored) <= len(headers):
        return headers, ""
    ends = np.maximum(stored.image_offset + stored.image_size, stored.label_offset + stored.label_size)
    return stored.take(np.flatnonzero(ends <= tar_bytes).tolist()), ""


def _difference(stored: ShardIndex, headers: ShardIndex) -> str:
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
    shards = request.shards
    keys = [index.keys[row] for row in rows]
    scan.packed_keys = zlib.compress("\0".join(keys).encode("utf-8", "surrogateescape"), 1)
    scan.samples = np.zeros(len(rows), SAMPLE)
    scan.samples["label_code"] = -1
    scan.samples["image_bytes"] = index.image_size[rows.start : rows.stop]
    in_tar = rows_of(entry.subset)[: len(index)] if entry.subset else range(len(index))
    statistics: list[SampleStatistics] = []
    for sample, key, row in zip(scan.samples, keys, rows, strict=True):
        label = os.pread(descriptor, int(index.label_size[row]), int(index.label_offset[row]))
        data = os.pread(descriptor, int(index.image_size[row]), int(index.image_offset[row]))
        sample["key_hash"] = np.frombuffer(_hash(key.encode("utf-8", "surrogateescape")), np.uint64)[0]
        sample["image_hash"] = np.frombuffer(_hash(data), np.uint64)
        is_readable, pixels = _scan_image(data, request=request, key=key, sample=sample, scan=scan)
        labels: tuple[int, ...] = ()
        try:
            labels = parse_label(label, spec=entry.labels, label_map=shards.label_map, num_classes=shards.num_classes)
            sample["label_code"], sample["is_whole"] = _code(labels), is_readable
        except ValueError as error:
            scan.add_fault("label", str(error), key=key)
        scan.class_counts.update(labels)
        if request.options.statistics:
            is_colour = pixels is not None and pixels.dtype == np.uint8
            fits = is_colour == (shards.channels == 0)  # without a manifest an array's channels have no columns
            image = image_statistics(pixels if fits else None, data)
            statistics.append(SampleStatistics(int(in_tar[row]), key, None, labels, image))
    if request.options.statistics:
        scan.statistics = to_parquet(statistics, channels=shards.channels)


def _scan_image(
    data: bytes, *, request: ScanRequest, key: str, sample: Any, scan: PartScan
) -> tuple[bool, Pixels | None]:
    """Return whether it is readable, and its pixels if it was decoded."""
    pixels, options, channels = None, request.options, request.shards.channels
    image_format = next((name for name, magic in _MAGIC.items() if magic.match(data)), None)
    if not data or (image_format is None and not options.decode):
        scan.add_fault("image", "it is of no known format" if data else "it is empty", key=key)
        return False, None
    if options.decode or channels:
        start = time.process_time()
        try:
            image = open_to_look(data, channels=channels, limit=options.pixel_limit)
            if channels and (wanted := request.shards.dtype) not in ("", image.dtype):
                raise UnreadableImage(f"its values are {image.dtype}, and those of the set {wanted}")
            mended = _jpeg_complaint(data) if image_format == "JPEG" and options.decode and not channels else ""
            if options.decode and (mended is not None or options.statistics):
                pixels = image.pixels()
        except UnreadableImage as error:
            scan.add_fault("image", str(error), key=key)
            return False, None
        scan.decode_seconds += time.process_time() - start
        sample["height"], sample["width"] = image.height, image.width
        if mended and re.search("corrupt|premature", mended, re.IGNORECASE):
            scan.add_fault("mended-image", mended, key=key)
    scan.formats[image_format or "another"] += 1
    return True, pixels


def _jpeg_complaint(data: bytes) -> str | None:
    """None if a strict decoder takes the image; it complains of damage, and of CMYK, which it does not support."""
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
    except ValueError as error:
        return str(error)
    return None


def _hash(data: bytes) -> bytes:
    """SHA-256, 16 bytes: with CPU instructions for it, twice as fast as BLAKE2."""
    return hashlib.sha256(data).digest()[:16]


def _code(labels: tuple[int, ...]) -> int:
    """Equal label sets have equal codes; a single label is its own."""
    if len(labels) == 1:
        return labels[0]
    return int.from_bytes(_hash(repr(sorted(labels)).encode())[:8], "little") >> 1 | 1 << 62


def _reason(error: Exception, entry: ShardEntry) -> str:
    return str(error).removeprefix(entry.name).lstrip(": ")


def _and_lost(text: str, num_samples: int) -> str:
    return "; ".join(filter(None, (text, f"{num_samples:,} samples are lost" if num_samples > 0 else "")))
