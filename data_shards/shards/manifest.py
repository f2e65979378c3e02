"""The manifest of a split: its shards, how many samples each holds, and the names of the classes.

`FOLDER/manifest.json` is written last, so a folder with one is complete. With it go the files that other tools look
for: `sizes.json` (open_clip, webdataset) and, one folder up, `_info.json` (timm). Reading costs one small file and one
`stat` a shard; digests are not verified. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from data_shards.durable import replace_text
from data_shards.errors import UserError
from data_shards.shards.labels import LabelSpec
from data_shards.shards.packed_shards import PackedShards, Shard
from data_shards.text import brief, parse_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
REMEDY = "make it with `shardvit pack SOURCE OUT`"

# A `stat` on a network file system is a millisecond of waiting: threads make it 32 times faster for many shards.
_STAT_THREADS = 32
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_STATS_IN_TURN = 64
_SLOW_STAT_SECONDS = 100e-6  # where the kernel answers by itself it takes 3; threads would take each other's turn
_PLAIN_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,1000}")  # needs no look at folders, schemes or surrogates
_MOST_NAME = 1024  # characters of a shard's file
_MOST = 1 << 48  # samples or bytes of one shard: far beyond any, and a sum of them still fits into 64 bits


@dataclass(frozen=True)
class Manifest:
    """One split of a packed data set; label `i` means `classes[i]`, and `labels` says where it is in a sample."""

    root: Path
    name: str
    split: str
    classes: tuple[str, ...]
    shards: Sequence[Shard]  # of one that was read: columns
    source: str
    labels: LabelSpec = field(default_factory=LabelSpec)
    without_matches_of: tuple[str, ...] = ()  # digests of the sets whose images were left out

    @property
    def num_samples(self) -> int:
        return int(PackedShards.of_shards(self.shards).num_samples.sum())

    @property
    def num_bytes(self) -> int:
        return int(PackedShards.of_shards(self.shards).num_bytes.sum())

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
        """32 hex digits (MLflow allows 36) that change with the shards' bytes or order, the classes, or the label spec.

        For a shard without a digest, its name and size count instead of its bytes.
        """
        rows = PackedShards.of_shards(self.shards)
        names = zip(rows.sha256, rows.files, rows.num_bytes.tolist(), strict=True)
        shards = [sha256 or f"{file}:{num_bytes}" for sha256, file, num_bytes in names]
        labels = [] if self.labels == LabelSpec() else [[self.labels.text, self.labels.kind]]
        return hashlib.sha256(json.dumps([shards, self.classes, *labels]).encode()).hexdigest()[:32]


def write_manifest(manifest: Manifest) -> Path:
    """Write `manifest.json` and `sizes.json` into `manifest.root`, each atomically; return the path of the former."""
    content = {
        "version": MANIFEST_VERSION,
        "name": manifest.name,
        "split": manifest.split,
        "source": manifest.source,
        "num_samples": manifest.num_samples,
        "classes": list(manifest.classes),
        "label_map": manifest.label_map,
        "labels": asdict(manifest.labels),
        "shards": [vars(shard) for shard in manifest.shards],
    }
    if manifest.without_matches_of:
        content["without_matches_of"] = list(manifest.without_matches_of)
    write_json(manifest.root / "sizes.json", {shard.file: shard.num_samples for shard in manifest.shards})
    write_json(path := manifest.root / MANIFEST_FILE, content)
    return path


def write_timm_info(folder: Path, manifests: Iterable[Manifest]) -> None:
    """Write `folder/_info.json`, so that timm reads the splits below it: `--dataset wds/ --data-dir FOLDER`."""
    splits = {
        manifest.split: {
            "name": manifest.split,
            "num_samples": manifest.num_samples,
            "filenames": [(manifest.root / shard.file).relative_to(folder).as_posix() for shard in manifest.shards],
            "shard_lengths": [shard.num_samples for shard in manifest.shards],
        }
        for manifest in manifests
    }
    write_json(folder / "_info.json", {"splits": splits})


def write_json(path: Path, content: object) -> None:
    """Replace `path` atomically; it is on the disk when this returns."""
    replace_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n", writers="several")


def read_manifest(folder: Path | str) -> Manifest:
    """Read and check `folder/manifest.json`.

    Raises UserError if the folder or the manifest is missing, broken, of another version or inconsistent, if a shard's
    name leads outside the folder, or if a shard is missing or has another size. A shard may be a symbolic link.
    """
    manifest = load_manifest(folder)
    for damage in shard_files(manifest).damage.values():
        raise UserError(damage)
    return manifest


def load_manifest(folder: Path | str) -> Manifest:
    """Read the manifest as `read_manifest`, but do not look at the shards."""
    root = Path(folder)
    path = root / MANIFEST_FILE
    if not root.is_dir():
        raise UserError(f"{root}: there is no such folder of shards; {REMEDY}")
    try:
        return parse_manifest(path.read_bytes(), root=root, name=str(path))
    except FileNotFoundError:
        inside = [split for split in ("train", "val", "test") if (root / split / MANIFEST_FILE).is_file()]
        hint = f"did you mean {root / inside[0]}?" if inside else REMEDY
        raise UserError(f"{root}: there is no {MANIFEST_FILE} in this folder; {hint}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def parse_manifest(text: bytes, *, root: Path, name: str) -> Manifest:
    """Parse a manifest; `name` is the file's in messages. Raises UserError as `read_manifest` does."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}; {REMEDY} again") from None
    if not isinstance(content, dict) or content.get("version") != MANIFEST_VERSION:
        found = brief(content.get("version")) if isinstance(content, dict) else None
        raise UserError(f"{name}: the manifest has version {found}, known here is {MANIFEST_VERSION}; {REMEDY} again")
    try:
        return _parse(root, content)
    except KeyError as error:
        raise UserError(f"{name}: the entry {error} is missing; {REMEDY} again") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: {error}; {REMEDY} again") from None


@dataclass(frozen=True)
class ShardFiles:
    """The state of a set's files."""

    damage: dict[int, str]  # number of a shard -> an error message, in order
    stamps: NDArray[np.int64]  # [shards, 2]: mtime, which can be set at will, and ctime, which cannot; -1: not there


def shard_files(manifest: Manifest) -> ShardFiles:
    """`stat` each shard: in turn if that is quick, in threads where each is a round trip over a network."""
    import numpy as np

    rows = PackedShards.of_shards(manifest.shards)
    folder = os.path.join(manifest.root, "")
    paths = [folder + file for file in rows.files]  # pathlib takes ten times as long
    wanted, found = rows.num_bytes.tolist(), np.full((len(paths), 3), -1, dtype=np.int64)

    def look(start: int) -> None:
        for number in range(start, min(start + _STATS_IN_TURN, len(paths))):
            try:
                status = os.stat(paths[number])
            except OSError:
                continue
            found[number] = status.st_size, status.st_mtime_ns, status.st_ctime_ns

    starts = range(0, len(paths), _STATS_IN_TURN)
    begin = time.perf_counter()
    for start in starts[:1]:
        look(start)
    if (time.perf_counter() - begin) / _STATS_IN_TURN > _SLOW_STAT_SECONDS:
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            list(pool.map(look, starts[1:]))
    else:
        for start in starts[1:]:
            look(start)
    damage: dict[int, str] = {}
    for at in np.flatnonzero(found[:, 0] != rows.num_bytes).tolist():
        what = f"the shard has {found[at, 0]} bytes where the manifest says {wanted[at]}; copy it again"
        if found[at, 0] < 0:
            what = "the manifest names this shard but it is not there; copy it here"
        damage[at] = f"{paths[at]}: {what} or {REMEDY}"
    return ShardFiles(damage, found[:, 1:].copy())


def _parse(root: Path, content: dict[str, Any]) -> Manifest:
    """Raises KeyError, TypeError or ValueError; the caller adds the file's name."""
    shards = _shards(_typed(content, "shards", list))
    classes = tuple(_typed(content, "classes", list))
    if not all(isinstance(name, str) for name in classes) or len(set(classes)) != len(classes) or not classes:
        raise ValueError("'classes' must be a list of different names")
    _text("".join(classes))
    if len(set(shards.files)) != len(shards):
        raise ValueError("'shards' names a file twice")
    manifest = Manifest(
        root=root,
        name=_typed(content, "name", str),
        split=_typed(content, "split", str),
        classes=classes,
        shards=shards,
        source=_typed(content, "source", str),
        labels=_labels(content),
        without_matches_of=_texts(content.get("without_matches_of", [])),
    )
    if content["label_map"] != manifest.label_map:
        raise ValueError("'label_map' contradicts 'classes'")
    if content["num_samples"] != manifest.num_samples:
        raise ValueError("'num_samples' is not the sum over the shards")
    return manifest


def _shards(entries: list[Any]) -> PackedShards:
    """Check whole columns where all is as `write_manifest` has it, in a fifth of the time; else one by one."""
    names = ("file", "num_samples", "num_bytes", "sha256")
    kinds = [dict, str, int, int, str]
    try:
        columns = [[entry[name] for entry in entries] for name in names]
    except (KeyError, TypeError):
        columns = []
    if [set(map(type, column)) for column in (entries, *columns)] == [{kind} for kind in kinds]:
        files, num_samples, num_bytes, digests = columns
        counts = num_samples + num_bytes
        is_plain = all(map(_PLAIN_FILE.fullmatch, files)) and "".join(digests).isascii()
        if is_plain and min(counts) >= 0 and max(counts) <= _MOST:
            return PackedShards.of(files, num_samples, num_bytes, digests)
    return PackedShards.of_shards(
        [
            Shard(
                _inside(_typed(entry, "file", str)),
                _count(entry, "num_samples"),
                _count(entry, "num_bytes"),
                _typed(entry, "sha256", str),
            )
            for entry in entries
        ]
    )


def _typed(content: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(content, dict):
        raise TypeError("an entry of 'shards' is not a table")
    if not isinstance(content[key], kind):
        raise TypeError(f"'{key}' is not of type {kind.__name__}")
    return _text(content[key]) if kind is str else content[key]


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError("'without_matches_of' is not a list of text")
    return tuple(map(_text, found))


def _text(text: str) -> str:
    """Refuse lone surrogates, which JSON can hold but which can be neither printed nor encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text[:40]!a} is not text") from None
    return text


def _count(content: dict[str, Any], key: str) -> int:
    value = _typed(content, key, int)
    if isinstance(value, bool) or not 0 <= value <= _MOST:
        raise ValueError(f"'{key}' is not a count: {brief(value)}")
    return value


def _inside(file: str) -> str:
    path = PurePosixPath(file)
    is_strange = len(file) > _MOST_NAME or "\\" in file or "\0" in file
    if is_strange or not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the shard {file[:80]!r} does not lie inside the folder")
    if _SCHEME.match(file):
        raise ValueError(f"the shard {file[:80]!r} is a command or a URL, where only a file in the folder can be")
    return file


def _labels(content: dict[str, Any]) -> LabelSpec:
    entry = _typed(content, "labels", dict)
    try:
        return LabelSpec(part=entry["part"], key=entry["key"], kind=entry["kind"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"'labels': {error}") from None
