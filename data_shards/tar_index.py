"""Where each sample of a tar lies, so that a sample is one `pread` instead of a walk through the tar.

The index is kept beside the tar as NAME.idx, in the text form of DALI's `wds2idx` (version v1.2: a header
with the number of samples, then one line per sample with "extension offset size member" for each of its
parts), so DALI reads it too. Building costs one pass over the headers (about 70 us per sample); reading about
3 us per sample.

Samples are grouped as webdataset does: neighbouring members that share everything up to the first dot of the
file name. Each needs exactly one image and one `cls` (the label as an ASCII integer); other parts (`json`,
`txt`, ...) are left out of the index. Compressed tars have no usable offsets and are refused.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_shards.errors import UserError

LABEL_EXTENSION = "cls"
IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"})
_VERSION = "v1.2"
_BLOCK_BYTES = 512  # tar pads every member to whole blocks


@dataclass(frozen=True)
class ShardIndex:
    """One tar's samples in their order; all arrays are int64 of shape (num_samples,), in bytes from the tar's
    start.
    """

    keys: list[str]
    image_extension: list[str]
    image_offset: NDArray[np.int64]
    image_size: NDArray[np.int64]
    label_offset: NDArray[np.int64]
    label_size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class _Part:
    key: str
    extension: str
    offset: int
    size: int


def index_path(tar_path: Path | str) -> Path:
    """`a/b-000000.tar` -> `a/b-000000.idx`."""
    return Path(tar_path).with_suffix(".idx")


def build_index(tar_path: Path | str) -> ShardIndex:
    """Index a tar by walking its headers.

    Raises UserError if it is no plain tar, is damaged or cut short (tarfile and webdataset silently drop the
    rest of such a tar), or holds a sample without exactly one image and one label.
    """
    path = Path(tar_path)
    samples: list[list[_Part]] = []
    for part in _parts(path):
        if not samples or samples[-1][0].key != part.key:
            samples.append([])
        samples[-1].append(part)
    return _collect(path, samples)


def write_index(index: ShardIndex, path: Path | str) -> None:
    """Write the text form. Raises UserError for a key with white space in it, which the form cannot
    express.
    """
    lines = [f"{_VERSION} {len(index)}"]
    for i, key in enumerate(index.keys):
        if re.search(r"\s", key):
            raise UserError(
                f"{path}: the key {key!r} has white space in it, which an index file cannot hold; rename it"
            )
        parts = [
            (int(index.image_offset[i]), int(index.image_size[i]), index.image_extension[i]),
            (int(index.label_offset[i]), int(index.label_size[i]), LABEL_EXTENSION),
        ]
        lines.append(" ".join(f"{ext} {offset} {size} {key}.{ext}" for offset, size, ext in sorted(parts)))
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_index(path: Path | str) -> ShardIndex:
    """Read an index file, ours or DALI's. Raises UserError if it is missing or broken."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        version, count = lines[0].split()
        if version != _VERSION or int(count) != len(lines) - 1:
            raise ValueError(f"it should start with '{_VERSION}' and the number of lines that follow")
        samples = [_parse_line(line) for line in lines[1:]]
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such index file; build it from the tar") from None
    except (ValueError, IndexError) as error:
        raise UserError(f"{path}: not a readable index ({error}); delete it, and it is built anew") from None
    return _collect(path, samples)


def open_index(tar_path: Path | str) -> ShardIndex:
    """The index beside the tar, or one built from the tar (and not written) where there is none.

    Raises UserError as `read_index` and `build_index` do, and if the index points behind the tar's end.
    """
    path = index_path(tar_path)
    if not path.is_file():
        return build_index(tar_path)
    index = read_index(path)
    num_bytes = Path(tar_path).stat().st_size
    ends = [index.image_offset + index.image_size, index.label_offset + index.label_size]
    if len(index) and max(int(end.max()) for end in ends) > num_bytes:
        raise UserError(f"{path}: this index is not that of {tar_path}; delete it, and it is built anew")
    return index


def _parse_line(line: str) -> list[_Part]:
    fields = line.split()
    if not fields or len(fields) % 4:
        raise ValueError(f"a line has {len(fields)} fields, not four per member")
    parts = []
    for extension, offset, size, member in zip(fields[0::4], fields[1::4], fields[2::4], fields[3::4], strict=True):
        if int(offset) < 0 or int(size) < 0:
            raise ValueError(f"a negative offset or size for {member}")
        key = member[: len(member) - len(extension) - 1]
        parts.append(_Part(key, extension.lower(), int(offset), int(size)))
    if len({part.key for part in parts}) != 1:
        raise ValueError(f"one line with members of several samples: {line[:80]}")
    return parts


def _parts(path: Path) -> Iterator[_Part]:
    """The members of a tar that webdataset would see, with the tar's integrity checked on the way."""
    end = 0
    try:
        with tarfile.open(path, mode="r:") as tar:
            for member in tar:
                end = member.offset_data
                if member.isreg():
                    end += -(-member.size // _BLOCK_BYTES) * _BLOCK_BYTES
                    if member.sparse is not None:
                        raise UserError(f"{path}: the member {member.name} is a sparse file; pack it anew")
                    part = _split(member)
                    if part is not None:
                        yield part
                tar.members = []  # pyright: ignore[reportAttributeAccessIssue]  # else tarfile keeps every header in memory
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such tar") from None
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{path}: not a plain, uncompressed tar ({error})") from None
    with open(path, "rb") as stream:
        stream.seek(end)
        block = stream.read(_BLOCK_BYTES)
    if len(block) < _BLOCK_BYTES:
        raise UserError(f"{path}: the tar is cut short (no end marker at byte {end}); copy or pack it again")
    if any(block):
        raise UserError(f"{path}: the tar is damaged (no readable header at byte {end}); copy or pack it again")


def _split(member: tarfile.TarInfo) -> _Part | None:
    folder, slash, file = member.name.rpartition("/")
    stem, dot, extension = file.partition(".")
    # Without a stem or an extension it belongs to no sample; __NAME__ is webdataset's mark for metadata.
    if not stem or not dot or re.match(r"__[^/]*__($|/)", member.name):
        return None
    return _Part(folder + slash + stem, extension.lower(), member.offset_data, member.size)


def _collect(path: Path, samples: list[list[_Part]]) -> ShardIndex:
    keys: list[str] = []
    extensions: list[str] = []
    positions = np.empty((4, len(samples)), dtype=np.int64)
    for i, parts in enumerate(samples):
        images = [part for part in parts if part.extension in IMAGE_EXTENSIONS]
        labels = [part for part in parts if part.extension == LABEL_EXTENSION]
        if len(images) != 1 or len(labels) != 1:
            raise UserError(
                f"{path}: the sample {parts[0].key} has {len(images)} images and {len(labels)} "
                f".{LABEL_EXTENSION} members; it needs one of each, next to each other"
            )
        keys.append(parts[0].key)
        extensions.append(images[0].extension)
        positions[:, i] = images[0].offset, images[0].size, labels[0].offset, labels[0].size
    return ShardIndex(keys, extensions, *positions)
