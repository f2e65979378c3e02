"""Images inside tars, read where they lie: plain tars, tars within tars (ImageNet's 1,000 class tars in one), gzipped.

A plain tar is walked once by its headers, the tars in it on threads, and an image is one `pread`: nothing is unpacked,
and nothing but names, offsets and sizes is held in memory. What was found is kept in the user's cache folder, so the
same tars open at once the next time. gzip has no places to jump to: a .tar.gz is decompressed once, into a folder that
the caller names and removes. Members other than regular files are passed over (devices, links), but for images that
are links, which are refused: they would be missing. Names are never used as paths, and one that leads outside is
refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import os
import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_shards.durable import replaced
from data_shards.errors import UserError
from data_shards.packing.sources.base import GZIPPED, SUFFIXES, is_image
from data_shards.progress_line import LINE_SECONDS
from data_shards.shards.shard_index import MOST_TAR_BYTES, Texts, default_index_folder, read_arrays
from data_shards.shards.shard_set import Report
from data_shards.shards.tar_walk import BLOCK_BYTES, Member, TarDamage, stated_member, walk_tar
from data_shards.text import named, show_bytes

_VERSION = 2  # of what is kept of a listing
_COPY_BYTES = 1 << 20
_SAID_BYTES = 50_000_000  # below, nobody needs to know that it takes space
_LISTED_AT_ONCE_BYTES = 5_000_000_000
_THREADS = 16  # they wait for headers, which on a network disk take a millisecond each
_ARRAYS = ("archive", "offset", "size")
_DECOMPRESSING = threading.Lock()


@dataclass(frozen=True)
class Unpacking:
    """Where gzipped archives are decompressed (None: nowhere, they are refused), and who is told of it."""

    folder: Path | None = None
    report: Report = print


@dataclass(frozen=True)
class Archive:
    """One tar on the disk. Raises UserError if it cannot be opened."""

    path: Path
    unpacking: Unpacking = field(default_factory=Unpacking, repr=False, compare=False)

    @property
    def is_gzipped(self) -> bool:
        return self.path.name.lower().endswith(GZIPPED)

    @property
    def num_bytes(self) -> int:
        return self._stat.st_size

    @property
    def modified_ns(self) -> int:
        return self._stat.st_mtime_ns

    @cached_property
    def key(self) -> str:
        """Differs for every other file, and after every change that its size or time shows."""
        text = f"{_VERSION}\0{os.path.realpath(self.path)}\0{self.num_bytes}\0{self.modified_ns}"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    @cached_property
    def _stat(self) -> os.stat_result:
        try:
            return self.path.stat()
        except OSError as error:
            raise UserError(f"{self.path}: the archive cannot be read ({error.strerror})") from None

    def open(self) -> int:
        """A descriptor of the plain tar, to be closed by the caller; a gzipped one is decompressed if it is not yet."""
        path = self.path
        if self.is_gzipped:
            with _DECOMPRESSING:
                path = _decompressed(self)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True)
class Listing:
    """The regular files in some archives, in the archives' order; of a tar in a tar its files, as STEM/NAME."""

    archives: tuple[Archive, ...]
    names: Texts
    archive: NDArray[np.int64]  # [num_files]: which of the archives
    offset: NDArray[np.int64]  # [num_files]: of its data, in the plain tar
    size: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, row: int) -> bytes:
        """One file. Raises OSError if it cannot be read, or the archive is another one than when it was listed."""
        offset, size = int(self.offset[row]), int(self.size[row])
        with open(self.archives[int(self.archive[row])].open(), "rb", buffering=0) as tar:
            data = os.pread(tar.fileno(), BLOCK_BYTES + size, offset - BLOCK_BYTES)
        try:
            stated = stated_member(data[:BLOCK_BYTES])[1]
        except ValueError:
            stated = -1
        if stated != size or len(data) != BLOCK_BYTES + size:
            raise OSError("the archive has changed since it was listed")
        return data[BLOCK_BYTES:]


def list_archives(archives: Sequence[Archive], *, inside: Literal["names", "stems"] = "names") -> Listing:
    """List archives, from the cache folder if they were listed before.

    With `inside` "stems" the files of an archive are named STEM/NAME (`n01440764.tar` of a folder of class tars).
    Raises UserError, naming the archive, if one is damaged, not a tar, or names a file that leads outside.
    """
    whole = hashlib.sha256("\0".join([inside, *(archive.key for archive in archives)]).encode()).hexdigest()[:32]
    kept = default_index_folder() / f"archives-{whole}.npz"
    with contextlib.suppress(OSError, ValueError):
        return _load(kept, tuple(archives))
    total = sum(archive.num_bytes for archive in archives)
    if total >= _LISTED_AT_ONCE_BYTES:
        archives[0].unpacking.report(f"{archives[0].path}: listing {show_bytes(total)} of images, once")
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(lambda archive: _list_archive(archive, inside=inside), archives))
    counts = [sum(len(piece.names) for piece in pieces) for pieces in parts]
    pieces = [piece for part in parts for piece in part]
    listing = Listing(
        archives=tuple(archives),
        names=Texts.join([piece.names for piece in pieces]),
        archive=np.repeat(np.arange(len(parts)), counts).astype(np.int64),
        offset=np.concatenate([piece.offset for piece in pieces]),
        size=np.concatenate([piece.size for piece in pieces]),
    )
    with contextlib.suppress(OSError):  # it is for speed alone
        _save(listing, kept)
    return listing


def inner_name(name: str, *, archive: Path) -> str:
    """A member's name as paths are spelt: `./a//b.jpg` -> `a/b.jpg`. Raises UserError if it leads outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts or "\0" in name:
        raise UserError(f"{archive}: it holds a file named {name!a}, which leads outside of it; fetch another copy")
    return "/".join(parts)


def stem(name: str) -> str:
    """`train/n01440764.tar` -> `train/n01440764`."""
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]


class _Piece(NamedTuple):
    """Some files of one archive, compactly: ImageNet-21k has 14 million."""

    names: Texts
    offset: NDArray[np.int64]
    size: NDArray[np.int64]


def _list_archive(archive: Archive, *, inside: Literal["names", "stems"]) -> list[_Piece]:
    """Its plain files, then those of the tars in it, in order."""
    above = stem(archive.path.name) if inside == "stems" else ""
    with open(archive.open(), "rb", buffering=0) as opened:
        outer = _walk(opened.fileno(), archive.path, above=above)
        tars = [member for member in outer if member.name.lower().endswith(".tar")]

        def nested(tar: Member) -> _Piece:
            part = (tar.offset, tar.offset + tar.size)
            return _piece(_walk(opened.fileno(), archive.path, above=stem(tar.name), part=part))

        with ThreadPoolExecutor(_THREADS) as pool:
            plain = _piece([member for member in outer if not member.name.lower().endswith(".tar")])
            pieces = [plain, *pool.map(nested, tars)]
    _refuse_shared(pieces, archive.path)
    return pieces


def _refuse_shared(pieces: Sequence[_Piece], path: Path) -> None:
    """Raise UserError for two images that would have one name, such as a/1.png beside a.tar with 1.png in it."""
    folders = Counter(each for piece in pieces for each in {name.rpartition("/")[0] for name in piece.names})
    found = Counter(
        name for piece in pieces for name in set(piece.names) if folders[name.rpartition("/")[0]] > 1 and is_image(name)
    )
    if twice := sorted(name for name, count in found.items() if count > 1):
        raise UserError(
            f"{path}: it holds {named(twice, most=3)} twice, in a tar inside it and elsewhere; remove one of the two, "
            "or rename that tar"
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
    images = [name for name in links if is_image(name)]
    if images:
        raise UserError(
            f"{path}: {images[0]!a} in it is a link to an image ({len(images):,} of them); give the folder, or "
            "make the tar with --dereference --hard-dereference"
        )
    return found


def _piece(members: Sequence[Member]) -> _Piece:
    return _Piece(
        Texts.of(member.name for member in members),
        np.array([member.offset for member in members], dtype=np.int64),
        np.array([member.size for member in members], dtype=np.int64),
    )


def _decompressed(archive: Archive) -> Path:
    """The plain tar of a gzipped archive, made unless it is there."""
    folder = archive.unpacking.folder
    if folder is None:
        raise UserError(f"{archive.path}: it is compressed; decompress it (`gunzip`) and give the plain tar")
    path = folder / f"{stem(archive.path.name)}-{archive.key}.tar"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < archive.num_bytes:
            raise UserError(
                f"{archive.path}: decompressing it takes more than {show_bytes(archive.num_bytes)} in {folder}, and "
                f"{show_bytes(free)} are free; make room or choose an OUT on another disk"
            )
        if archive.num_bytes >= _SAID_BYTES:
            archive.unpacking.report(
                f"{archive.path}: a gzipped tar can only be read from its start, so it is decompressed once into "
                f"{folder} (more than {show_bytes(archive.num_bytes)}, removed when the shards are complete)"
            )
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:  # one process at a time, so that what an ended one has left is written over
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not path.exists():  # another process may have made it meanwhile
                with replaced(path) as beside:
                    _decompress(archive, beside)
        finally:
            os.close(handle)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{archive.path}: it cannot be decompressed ({error}); fetch it again") from None
    except OSError as error:
        raise UserError(
            f"{archive.path}: it cannot be decompressed into {folder} ({error.strerror}); make room or choose an OUT "
            "on another disk"
        ) from None
    return path


def _decompress(archive: Archive, target: Path) -> None:
    last_line = time.monotonic()
    with open(archive.path, "rb") as raw, gzip.GzipFile(fileobj=raw) as stream, open(target, "wb") as plain:
        while data := stream.read(_COPY_BYTES):
            plain.write(data)
            if time.monotonic() - last_line >= LINE_SECONDS:
                last_line = time.monotonic()
                share = raw.tell() / max(archive.num_bytes, 1)
                archive.unpacking.report(f"decompressing {archive.path.name}: {share:.0%}")


def _save(listing: Listing, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, sync="none", writers="several") as beside, beside.open("wb") as stream:
        names = listing.names.blob
        arrays = {name: getattr(listing, name) for name in _ARRAYS}
        np.savez(stream, names=names, ends=listing.names.ends, **arrays)


def _load(path: Path, archives: tuple[Archive, ...]) -> Listing:
    """Raises ValueError for anything that no listing of these archives can be."""
    names, ends, *arrays = read_arrays(path, ["names", "ends", *_ARRAYS]).values()
    if any(each.dtype != np.int64 or each.shape != ends.shape or each.ndim != 1 for each in (ends, *arrays)):
        raise ValueError("its arrays do not fit together")
    if any(((each < 0) | (each >= MOST_TAR_BYTES)).any() for each in arrays) or (arrays[0] >= len(archives)).any():
        raise ValueError("an archive, offset or size that cannot be")
    if (np.diff(ends, prepend=0) < 0).any() or (ends[-1] if len(ends) else 0) != names.size:
        raise ValueError("its names do not fit together")
    return Listing(archives, Texts(np.frombuffer(names.tobytes(), np.uint8), ends), *arrays)
