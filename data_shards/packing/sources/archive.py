"""Read files in place from folders and tars: plain, nested (ImageNet's class tars) or gzipped.

A tar is walked once by its headers; each image is then one `pread`. Memory holds names, offsets and sizes; listings are
kept in the user's cache. gzip cannot seek, so a .tar.gz is decompressed once, into a folder that the caller names and
removes. Devices and links are skipped; links to images, and names that lead outside, are refused.
"""

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardvit.data_shards.durable import replaced
from shardvit.data_shards.engines.engine import PartsEngine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import (
    GZIPPED,
    SUFFIXES,
    Int64s,
    is_image,
)
from shardvit.data_shards.packing.sources.located import Container, LocatedFiles, folder_files, stamp_of
from shardvit.data_shards.packing.sources.tree import local_tree
from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.shards.shard_index import MOST_TAR_BYTES, Texts, default_index_folder, read_arrays
from shardvit.data_shards.shards.shard_set import Report
from shardvit.data_shards.shards.tar_walk import Member, TarDamage, walk_tar
from shardvit.data_shards.text import named, show_bytes

_VERSION = 2  # of cached listings
_LISTED_AT_ONCE_BYTES = 5_000_000_000
_THREADS = 16  # they wait for headers: a millisecond each on a network disk
_ARRAYS = {"archive": "archive", "offset": "offset", "size": "sizes"}  # name on disk -> field of _Listing
_MOST_SMALL_BYTES = 1 << 28  # of a file read whole: CIFAR-100's training part has 155 MB


@dataclass(frozen=True)
class Unpacking:
    """Folder for decompressed archives (None: refuse gzipped ones), a progress reporter, and who lists tars, where."""

    folder: Path | None = None
    report: Report = print
    engine: PartsEngine | None = None  # None: this machine's cores
    work: str = ""  # a folder that all workers see; "": `folder`


@dataclass(frozen=True)
class Archive:
    """One tar on disk; UserError if it cannot be opened."""

    path: Path
    unpacking: Unpacking = field(default_factory=Unpacking, repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        return self.stat.st_size

    @cached_property
    def key(self) -> str:
        text = f"{_VERSION}\0{os.path.realpath(self.path)}\0{self.num_bytes}\0{self.stat.st_mtime_ns}"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    @cached_property
    def stat(self) -> os.stat_result:
        try:
            return self.path.stat()
        except OSError as error:
            raise UserError(f"{self.path}: the archive cannot be read ({error.strerror})") from None

    @property
    def container(self) -> Container:
        location, stamp = os.path.abspath(self.path), f"{self.num_bytes}-{self.stat.st_mtime_ns}"
        if not is_gzipped(location):
            return Container("tar", location, stamp)
        if self.unpacking.folder is None:
            raise UserError(f"{self.path}: it is compressed; decompress it (`gunzip`) and give the plain tar")
        plain = self.unpacking.folder / f"{stem(self.path.name)}-{self.key}.tar"
        return Container("tar", os.path.abspath(plain), stamp, compressed=location)


def list_archives(archives: Sequence[Archive], *, folder: Path | None = None) -> LocatedFiles:
    """List archives, cached; with `folder`, files are named STEM/NAME. UserError names a damaged or unsafe archive."""
    inside = "names" if folder is None else "stems"
    whole = hashlib.sha256("\0".join([inside, *(archive.key for archive in archives)]).encode()).hexdigest()[:32]
    kept = default_index_folder() / f"archives-{whole}.npz"
    path = folder or archives[0].path
    with contextlib.suppress(OSError, ValueError):
        return _located(path, archives, _load(kept, len(archives)))
    total = sum(archive.num_bytes for archive in archives)
    if total >= _LISTED_AT_ONCE_BYTES:
        archives[0].unpacking.report(f"{archives[0].path}: listing {show_bytes(total)} of images, once")
    with ThreadPoolExecutor(_THREADS) as pool:
        stems = [stem(archive.path.name) if folder else "" for archive in archives]
        parts = pool.map(_list_archive, archives, count(), stems)
        names, *arrays = zip(*(piece for part in parts for piece in part), strict=True)
    found = _Listing(Texts.join(names), *map(np.concatenate, arrays))
    with contextlib.suppress(OSError):  # the cache only saves time
        _save(found, kept)
    return _located(path, archives, found)


def open_files(path: Path, *, unpacking: Unpacking) -> LocatedFiles:
    """List a folder (names start with its own, as in an archive of it) or an archive; UserError for others."""
    if path.is_dir():
        whole = Path(os.path.abspath(path))
        images, others = local_tree(whole.parent).walk(whole.name)
        return folder_files(whole.parent, [*images, *others], path=path)
    if not is_archive(path):
        raise UserError(f"{path}: there is no such folder, and no archive ({', '.join(SUFFIXES)}) of that name")
    return list_archives([Archive(path, unpacking)])


def is_archive(path: Path) -> bool:
    """True for an existing file with an archive's suffix."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def is_tar(location: str) -> bool:
    """True for the name of a tar, gzipped or not, whatever follows in a URL."""
    return redacted(location).lower().endswith(SUFFIXES)


def is_gzipped(location: str) -> bool:
    """True for the name of a .tar.gz or .tgz."""
    return redacted(location).lower().endswith(GZIPPED)


def read_small(files: LocatedFiles, row: int) -> bytes:
    """Read a whole file, such as a list; UserError if it is missing, or larger than any published one."""
    try:
        if not 0 <= files.sizes[row] <= _MOST_SMALL_BYTES:
            raise OSError("not a plain file of the size that is published")
        return files.read(row)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{files.path}: {files.names[row]!a} in it cannot be read ({reason}); fetch it again") from None


def rows_by_name(files: LocatedFiles, wanted: Iterable[str] | None = None) -> dict[str, int]:
    """Map base names to rows, all or those `wanted`, without hidden files."""
    names = None if wanted is None else set(wanted)
    last = ((path.rpartition("/")[2], row) for row, path in enumerate(files.names))
    return {name: row for name, row in last if not name.startswith(".") and (names is None or name in names)}


def inner_name(name: str, *, archive: Path | str) -> str:
    """Normalise a member's name: `./a//b.jpg` -> `a/b.jpg`; UserError if it leads outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts or "\0" in name:
        raise UserError(f"{archive}: it holds a file named {name!a}, which leads outside of it; fetch another copy")
    return "/".join(parts)


def refuse_links(links: Sequence[str], *, archive: Path | str) -> None:
    """UserError if an image is among the links of a tar."""
    images = [name for name in links if is_image(name)]
    if images:
        raise UserError(
            f"{archive}: {images[0]!a} in it is a link to an image ({len(images):,} of them); give the folder, or "
            "make the tar with --dereference --hard-dereference"
        )


def stem(name: str) -> str:
    """`train/n01440764.tar` -> `train/n01440764`."""
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]


class _Listing(NamedTuple):
    """Regular files of some archives, in the archives' order; those of nested tars are named STEM/NAME."""

    names: Texts
    archive: Int64s  # [num_files]: number of the archive
    offset: Int64s  # [num_files]: of its data, in the plain tar
    sizes: Int64s


def _list_archive(archive: Archive, number: int, above: str) -> list[_Listing]:
    with open(archive.container.plain(archive.unpacking.report), "rb", buffering=0) as opened:
        outer = _walk(opened.fileno(), archive.path, above=above)
        tars = [member for member in outer if member.name.lower().endswith(".tar")]

        def nested(tar: Member) -> _Listing:
            part = (tar.offset, tar.offset + tar.size)
            return _listing(_walk(opened.fileno(), archive.path, above=stem(tar.name), part=part), number)

        with ThreadPoolExecutor(_THREADS) as pool:
            plain = _listing([member for member in outer if not member.name.lower().endswith(".tar")], number)
            pieces = [plain, *pool.map(nested, tars)]
    _refuse_shared(pieces, archive.path)
    return pieces


def _refuse_shared(pieces: Sequence[_Listing], path: Path) -> None:
    """Refuse two images of one name, such as a/1.png and 1.png in a.tar."""
    folders = Counter(each for piece in pieces for each in {name.rpartition("/")[0] for name in piece.names})
    found = Counter(
        name for piece in pieces for name in set(piece.names) if folders[name.rpartition("/")[0]] > 1 and is_image(name)
    )
    if twice := sorted(name for name, count in found.items() if count > 1):
        raise UserError(
            f"{path}: it holds {named(twice, most=3)} twice, inside a tar in it and elsewhere; rename that tar"
        )


def _walk(descriptor: int, path: Path, *, above: str, part: tuple[int, int | None] = (0, None)) -> list[Member]:
    found: list[Member] = []
    links: list[str] = []
    last = above.rpartition("/")[2]
    try:
        for member in walk_tar(descriptor, start=part[0], end=part[1], links=links):
            name = inner_name(member.name, archive=path)
            if above and name.startswith(f"{last}/"):  # n01440764.tar may hold a folder n01440764 or not
                name = name[len(last) + 1 :]
            found.append(Member(f"{above}/{name}" if above else name, member.offset, member.size))
    except TarDamage as error:
        within = f" ({above}.tar in it)" if part[1] is not None else ""
        raise UserError(f"{path}{within}: {error}; fetch it again") from None
    refuse_links(links, archive=path)
    return found


def _listing(members: Sequence[Member], archive: int) -> _Listing:
    arrays = (np.array(each, np.int64) for each in ([m.offset for m in members], [m.size for m in members]))
    return _Listing(Texts.of(member.name for member in members), np.full(len(members), archive), *arrays)


def _located(path: Path, archives: Sequence[Archive], found: _Listing) -> LocatedFiles:
    places = zip(found.names, found.archive.tolist(), found.offset.tolist(), found.sizes.tolist(), strict=True)
    stats = [(each.num_bytes, each.stat.st_mtime_ns) for each in archives]
    stamps = (stamp_of(name, (offset, size, *stats[archive])) for name, archive, offset, size in places)
    return LocatedFiles(
        str(path),
        tuple(archive.container for archive in archives),
        found.names,
        found.archive.astype(np.int32),
        found.offset,
        found.sizes,
        np.fromiter(stamps, np.uint64, len(found.names)),
    )


def _save(found: _Listing, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, sync="none", writers="several") as beside, beside.open("wb") as stream:
        arrays = {name: getattr(found, ours) for name, ours in _ARRAYS.items()}
        np.savez(stream, names=found.names.blob, ends=found.names.ends, **arrays)


def _load(file: Path, num_archives: int) -> _Listing:
    names, ends, *arrays = read_arrays(file, ["names", "ends", *_ARRAYS]).values()
    if any(each.dtype != np.int64 or each.shape != ends.shape or each.ndim != 1 for each in (ends, *arrays)):
        raise ValueError("its arrays do not fit together")
    if any(((each < 0) | (each >= MOST_TAR_BYTES)).any() for each in arrays) or (arrays[0] >= num_archives).any():
        raise ValueError("an archive, offset or size that cannot be")
    if (np.diff(ends, prepend=0) < 0).any() or (ends[-1] if len(ends) else 0) != names.size:
        raise ValueError("its names do not fit together")
    return _Listing(Texts(np.frombuffer(names.tobytes(), np.uint8), ends), *arrays)
