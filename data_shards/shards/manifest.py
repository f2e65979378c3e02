"""Read and format a split's manifest: its shards, how many samples each holds, and the class names.

`FOLDER/manifest.json` is written last, so a folder that has one is complete. Beside it may be `manifest-NAME.json`: a
choice of the same folder's samples, or an earlier manifest, named by its digest. Files for other tools: `sizes.json`
(open_clip, webdataset) and, one folder up, `_info.json` (timm). Reading costs one small file and one `stat` a shard;
digests are not verified. Needs no torch.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.location import is_local, join, local_path
from shardvit.data_shards.shards.row_bitmap import counted_rows
from shardvit.data_shards.text import brief, one_line
from shardvit.data_shards.vocabulary import IMAGE_TYPES, MOST_CHANNELS, LabelKind, LabelPart

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
REMEDY = "make it with `shardvit pack SOURCE OUT`"

# A `stat` on a network file system waits a millisecond: for many shards, threads are 32 times faster.
_STAT_THREADS = 32
_STATS_IN_TURN = 64
_SLOW_STAT_SECONDS = 100e-6  # a local one takes 3 µs, and threads would only take turns
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_NAMED = re.compile(r"manifest-[A-Za-z0-9_.-]{1,100}\.json")
_NAMED_URL = re.compile(rf"([^?#]*)/({_NAMED.pattern}|{re.escape(MANIFEST_FILE)})((?:[?#].*)?)", re.DOTALL)
_PLAIN_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,1000}")  # certainly inside the folder
_OPTIONAL = ("without_matches_of", "where", "parent", "channels", "dtype")  # left out of the file if they are empty
_MOST_NAME = 1024  # characters of a shard's file
_MOST = 1 << 48  # samples or bytes of one shard: far beyond any, and sums still fit into 64 bits


@dataclass(frozen=True)
class Shard:
    """One tar: `file` is relative to the manifest's folder, `sha256` digests all its bytes ("" if unknown)."""

    file: str
    num_samples: int  # that count
    num_bytes: int
    sha256: str
    rows: str = ""  # which of its samples count, see `row_bitmap`; "": all

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "rows" or value}


@dataclass(frozen=True)
class Manifest:
    """One split of a packed data set; label `i` means `classes[i]`, and `labels` says where it is in a sample."""

    root: Path
    name: str
    split: str
    classes: tuple[str, ...]
    shards: tuple[Shard, ...]
    source: str
    labels: LabelSpec = field(default_factory=LabelSpec)
    without_matches_of: tuple[str, ...] = ()  # digests of sets whose images were left out
    where: str = ""  # the expression that chose its samples
    parent: str = ""  # digest of the manifest that they were chosen from
    channels: int = 0  # of every image, read as they are (`images.channels`); 0: any image, as colours of 8 bits
    dtype: str = ""  # of these: uint8, uint16 or float32

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def label_map(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def shard_paths(self) -> tuple[Path, ...]:
        return tuple(self.root / shard.file for shard in self.shards)

    @property
    def digest(self) -> str:
        """32 hex digits that change with the shards' bytes (or names and sizes) and order, the samples that count, the
        classes, labels or channels."""
        shards: list[object] = [shard.sha256 or f"{shard.file}:{shard.num_bytes}" for shard in self.shards]
        shards = [[each, shard.rows] if shard.rows else each for each, shard in zip(shards, self.shards, strict=True)]
        labels = [] if self.labels == LabelSpec() else [[self.labels.text, self.labels.kind]]
        read = [self.channels] if self.channels else []
        return hashlib.sha256(json.dumps([shards, self.classes, *labels, *read]).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Labels:
    part: LabelPart
    key: str | None
    kind: LabelKind

    def __post_init__(self) -> None:
        LabelSpec(**vars(self))  # checks that key and part match


@dataclass(frozen=True)
class _ManifestFile:
    version: Literal[1]
    name: str
    split: str
    source: str
    num_samples: int
    classes: tuple[str, ...]
    label_map: dict[str, int]
    labels: _Labels
    shards: tuple[Shard, ...]
    without_matches_of: tuple[str, ...] = ()
    where: str = ""
    parent: str = ""
    channels: int = 0
    dtype: str = ""


def manifest_name(name: str) -> str:
    """`clean` -> `manifest-clean.json`; UserError for a name that is none."""
    if not _NAMED.fullmatch(file := f"manifest-{name}.json"):
        raise UserError(f"--manifest: {name[:100]!a} names no file; give letters, digits, dots, - and _")
    return file


def split_manifest(location: str) -> tuple[str, str]:
    """Split a location into its folder and its manifest's name: `SET/train`, or `SET/train/manifest-clean.json`."""
    if is_local(location):
        path = local_path(location)
        if (path.name == MANIFEST_FILE or _NAMED.fullmatch(path.name)) and not path.is_dir():
            return str(path.parent), path.name
    elif found := _NAMED_URL.fullmatch(location):
        return found[1] + found[3], found[2]
    return location, MANIFEST_FILE


def manifest_at(location: str) -> str:
    """Locate a set's manifest, given its folder or itself."""
    return join(*split_manifest(location))


def as_json(manifest: Manifest) -> dict[str, object]:
    """Format a manifest's file."""
    content: dict[str, object] = {
        "version": MANIFEST_VERSION,
        "name": manifest.name,
        "split": manifest.split,
        "source": manifest.source,
        "num_samples": manifest.num_samples,
        "classes": list(manifest.classes),
        "label_map": manifest.label_map,
        "labels": asdict(manifest.labels),
        "shards": [shard.as_json() for shard in manifest.shards],
    }
    return content | {name: value for name in _OPTIONAL if (value := getattr(manifest, name))}


def timm_info(manifests: Iterable[Manifest]) -> dict[str, object]:
    """Format `_info.json`, beside the splits' folders, so that timm reads them: `--dataset wds/ --data-dir FOLDER`."""
    splits = {
        manifest.split: {
            "name": manifest.split,
            "num_samples": manifest.num_samples,
            "filenames": [f"{manifest.split}/{shard.file}" for shard in manifest.shards],
            "shard_lengths": [shard.num_samples for shard in manifest.shards],
        }
        for manifest in manifests
    }
    return {"splits": splits}


def json_text(content: object) -> str:
    """Format a file that people may read, too."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def read_manifest(folder: Path | str) -> Manifest:
    """Read and check `folder/manifest.json`, or the manifest that is given instead of its folder.

    UserError if the folder or the manifest is missing, broken, of another version or inconsistent, if a shard's name
    leads outside the folder, or if a shard is missing or has another size. A shard may be a symbolic link.
    """
    manifest = load_manifest(folder)
    for damage in shard_files(manifest).damage.values():
        raise UserError(damage)
    return manifest


def load_manifest(folder: Path | str) -> Manifest:
    """Read the manifest as `read_manifest` does, without checking the shards."""
    root, file = map(Path, split_manifest(str(folder)))
    path = root / file
    if not root.is_dir():
        raise UserError(f"{root}: there is no such folder of shards; {REMEDY}")
    try:
        return parse_manifest(path.read_bytes(), root=root, name=str(path))
    except FileNotFoundError:
        inside = [split for split in ("train", "val", "test") if (root / split / MANIFEST_FILE).is_file()]
        hint = f"did you mean {root / inside[0]}?" if inside else REMEDY
        raise UserError(f"{root}: there is no {file} in this folder; {hint}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def parse_manifest(text: bytes, *, root: Path, name: str) -> Manifest:
    """Parse a manifest; `name` is the file's in messages. UserError as in `read_manifest`."""
    from pydantic import TypeAdapter, ValidationError

    try:
        content = TypeAdapter(_ManifestFile).validate_json(text, strict=True)
        same = {name: getattr(content, name) for name in ("name", "split", "classes", "shards", "source", *_OPTIONAL)}
        manifest = Manifest(root, **same, labels=LabelSpec(**vars(content.labels)))
        _check(manifest)
        if content.label_map != manifest.label_map:
            raise ValueError("'label_map' contradicts 'classes'")
        if content.num_samples != manifest.num_samples:
            raise ValueError("'num_samples' is not the sum over the shards")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = one_line(".".join(map(str, first["loc"])))[:80]
        reason = f"'{place}': {first['msg']}" if place else first["msg"]
        raise UserError(f"{name}: {reason}; {REMEDY} again") from None
    except ValueError as error:
        raise UserError(f"{name}: {error}; {REMEDY} again") from None
    return manifest


@dataclass(frozen=True)
class ShardFiles:
    """The state of a set's files."""

    damage: dict[int, str]  # shard number -> error message, in order
    stamps: list[str]  # mtime, which can be set at will, and ctime, which cannot; "" for a missing shard


def shard_files(manifest: Manifest) -> ShardFiles:
    """`stat` each shard: one by one if that is quick, in threads if each is a network round trip."""
    folder = os.path.join(manifest.root, "")
    paths = [folder + shard.file for shard in manifest.shards]  # pathlib takes ten times as long
    begin = time.perf_counter()
    found = list(map(_stat, paths[:_STATS_IN_TURN]))
    if (time.perf_counter() - begin) / _STATS_IN_TURN > _SLOW_STAT_SECONDS:
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            found += pool.map(_stat, paths[_STATS_IN_TURN:], chunksize=_STATS_IN_TURN)
    else:
        found += map(_stat, paths[_STATS_IN_TURN:])
    damage: dict[int, str] = {}
    for number, (shard, status) in enumerate(zip(manifest.shards, found, strict=True)):
        if status is None:
            damage[number] = "the manifest names this shard but it is not there; copy it here"
        elif status[0] != shard.num_bytes:
            damage[number] = f"the shard has {status[0]} bytes where the manifest says {shard.num_bytes}; copy it again"
    damage = {number: f"{paths[number]}: {what} or {REMEDY}" for number, what in damage.items()}
    return ShardFiles(damage, [status[1] if status else "" for status in found])


def _stat(path: str) -> tuple[int, str] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}"


def _check(manifest: Manifest) -> None:
    """ValueError for mistakes that the types allow."""
    if not manifest.classes or len(set(manifest.classes)) != len(manifest.classes):
        raise ValueError("'classes' must be a list of different names")
    files = [shard.file for shard in manifest.shards]
    if len(set(files)) != len(files):
        raise ValueError("'shards' names a file twice")
    if not 0 <= manifest.channels <= MOST_CHANNELS:
        raise ValueError(f"'channels' is {brief(manifest.channels)}, not 1 to {MOST_CHANNELS}")
    if manifest.dtype not in ("", *IMAGE_TYPES):
        raise ValueError(f"'dtype' is {brief(manifest.dtype)}, none of {', '.join(IMAGE_TYPES)}")
    for file in files:
        if not _PLAIN_FILE.fullmatch(file):
            _check_inside(file)
    for shard in manifest.shards:
        for name in ("num_samples", "num_bytes"):
            if not 0 <= getattr(shard, name) <= _MOST:
                raise ValueError(f"'{name}' of {shard.file[:80]} is not a count: {brief(getattr(shard, name))}")
        if shard.rows and counted_rows(shard.rows) != shard.num_samples:
            raise ValueError(f"'rows' of {shard.file[:80]} are malformed, or do not count its 'num_samples'")


def _check_inside(file: str) -> None:
    path = PurePosixPath(file)
    is_strange = len(file) > _MOST_NAME or "\\" in file or "\0" in file
    if is_strange or not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the shard {file[:80]!r} does not lie inside the folder")
    if _SCHEME.match(file):
        raise ValueError(f"the shard {file[:80]!r} is a command or a URL, where only a file in the folder can be")
