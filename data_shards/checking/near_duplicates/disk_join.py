"""Find candidates between collections too large for memory, or within one: their hashes are joined on disk.

Keys are the four bands of 16 bits of a hash's first word: words that differ in at most 3 bits share one for certain. Of
copies of 350 photographs, 0.99 or more share one that are re-encoded, resized, mirrored, grey or have a border, 0.97 of
those cropped to 90 % or more of each side or to the centre square, but 0.1 of those cropped to 80 %: only 15 of the 68
windows are joined (`MILD_PARTS`). A key has fewer bits below 4 million images. Under one key a hash meets 16,384 others
at most: where there are more, some bits of another band must be equal too, and beyond that the earliest stand for all.

For each band the 19 hashes of each image are written, cut by the first bits of the key (456 bytes an image, removed
after the band), and each cut is joined alone; equal digests likewise. Then the thumbnails of near hashes are aligned,
for 65,536 images at a time (see `candidates`). A worker holds 0.4 to 0.8 GB, the driver nothing. Near hashes by chance
grow with the square of the images: 0.15 an image among 10^7 drawn ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.checking.near_duplicates import candidates
from shardvit.data_shards.checking.near_duplicates.candidates import MOST_NEAR, PAIR, Pairs, make_pairs
from shardvit.data_shards.checking.near_duplicates.fingerprint import KeptFingerprints, Kind
from shardvit.data_shards.checking.near_duplicates.perceptual_hash import (
    MILD_PARTS,
    MOST_BITS,
    MOST_FIRST,
    NUM_WORDS,
    WHOLE,
    Int64s,
    distances,
    hash_windows,
    mirrored,
)
from shardvit.data_shards.engines.engine import PartsEngine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.progress_line import Progress

_Side = Literal["images", "others"]
_Key = Literal["digests", 0, 1, 2, 3]  # those of bytes and of pixels, or a band of the first word
_Batch = tuple[_Side, int, int]  # and its first part, and that of the next one

_KEYS: tuple[_Key, ...] = ("digests", 0, 1, 2, 3)
_BANDS = (0, 1, 2, 3)
_BAND_BITS = 16
_WINDOWS = {"wholes": WHOLE, "parts": MILD_PARTS}
_MOST_WINDOWS = 16
_CUT_ENTRIES, _KEY_ENTRIES = 1 << 21, 1 << 10  # at least, while bits are left
_BATCH_IMAGES = 1 << 16
_MOST_COMPARED = 1 << 14  # others under a key, per hash
_CELLS = 1 << 17  # compared at once: they stay in the core's cache
_PAIRS_LOADED = 1 << 15  # whose thumbnails are in memory

_ENTRY = np.dtype([("words", np.uint64, NUM_WORDS), ("code", np.int64)])  # code: image * _MOST_WINDOWS + window
_Entries = NDArray[Any]
_Values = NDArray[Any]  # unsigned, up to 16 bits


@dataclass(frozen=True)
class _Join:
    images: KeptFingerprints
    others: KeptFingerprints
    folder: Path
    key_bits: int  # of a band: fewer of them in smaller sets
    cut_bits: int  # the first of them, which say an entry's cut
    batch_images: int
    key: _Key = "digests"

    @property
    def is_within(self) -> bool:
        return self.images.digest == self.others.digest

    @property
    def num_ranges(self) -> int:
        return -(-int(self.images.starts[-1]) // self.batch_images)

    def batches(self, side: _Side) -> list[_Batch]:
        """Group a side's parts; within one collection both sides are one."""
        if self.is_within:
            side = "images"
        starts = (self.images if side == "images" else self.others).starts
        firsts = np.unique(starts[:-1] // self.batch_images, return_index=True)[1].tolist()
        return [(side, *each) for each in zip(firsts, [*firsts[1:], len(starts) - 1], strict=True)]

    def stem(self, batch: _Batch, role: str) -> Path:
        return self.folder / f"{self.key}-{batch[0]}-{role}-{batch[1]}"

    def values(self, words: NDArray[np.uint64]) -> _Values:
        """Take the key."""
        return _band(words, self.key if isinstance(self.key, int) else 3) >> (_BAND_BITS - self.key_bits)

    def cuts(self, words: NDArray[np.uint64]) -> _Values:
        return self.values(words) >> (self.key_bits - self.cut_bits)

    def entries(self, side: _Side, role: str, cut: int) -> _Entries:
        """Read a cut of all batches, ordered by image."""
        found = [_group(self.stem(batch, role), cut, _ENTRY) for batch in self.batches(side)]
        return np.concatenate([np.empty(0, _ENTRY), *found])


def find_on_disk(
    images: KeptFingerprints,
    others: KeptFingerprints,
    *,
    folder: Path,
    engine: PartsEngine,
    report: Callable[[str], None],
) -> list[Path]:
    """Find candidates as `find_candidates` does; files of pairs in `folder`, each image's in one of them."""
    num_images = int(images.starts[-1])
    entries = max(num_images, int(others.starts[-1])) * len(MILD_PARTS)
    cut_bits, key_bits = (min(_BAND_BITS, int(entries / most).bit_length()) for most in (_CUT_ENTRIES, _KEY_ENTRIES))
    join = _Join(images, others, folder, max(key_bits, cut_bits), cut_bits, _BATCH_IMAGES)

    def run(work: Callable[[_Join, Any], Any], parts: Sequence[Any], status: str) -> list[Any]:
        with Progress(num_images, report, status=f"{status} with {others.name}") as progress:
            found = engine.run(work, join, parts, done=lambda _: progress.add(num_images // len(parts)))
        if len(found) < len(parts):
            raise UserError(f"{status}: a worker was killed twice, probably for its memory: use fewer workers")
        return [found[part] for part in parts]

    for key in _KEYS:
        join = replace(join, key=key)
        status = f"join {_KEYS.index(key) + 1} of {len(_KEYS)}"
        batches = dict.fromkeys([*join.batches("images"), *join.batches("others")])
        run(_write_entries, [*batches], f"{status}: writing")
        run(_join_cut, range(1 << join.cut_bits), f"{status}: comparing")
        for file in folder.glob(f"{key}-*"):
            file.unlink()
    return run(_align_range, range(join.num_ranges), "aligning")


def _write_entries(join: _Join, batch: _Batch) -> None:
    name, first, end = batch
    side = join.images if name == "images" else join.others
    found: dict[str, list[_Entries]] = {}
    for part in range(first, end):
        rows = side.load(part)
        start, kinds = side.starts[part], rows["kind"]
        if join.key == "digests":
            for role, column, chosen in (
                ("bytes", "bytes_digest", np.flatnonzero(kinds != Kind.UNREAD)),
                ("pixels", "words", np.flatnonzero(kinds == Kind.PIXELS)),
            ):
                found.setdefault(role, []).append(_entries(rows[column][chosen][:, None], start + chosen))
        else:
            hashed = np.flatnonzero(kinds == Kind.HASH)
            for at in range(0, max(1, len(hashed)), candidates.AT_ONCE):
                chosen = hashed[at : at + candidates.AT_ONCE]
                for role, windows in _WINDOWS.items():
                    hashes = hash_windows(rows["thumbnail"][chosen], windows)
                    found.setdefault(role, []).append(_entries(hashes, start + chosen))
    for role, each in found.items():
        entries = np.concatenate(each)
        _write_groups(join.stem(batch, role), entries, join.cuts(entries["words"][:, 0]), 1 << join.cut_bits)


def _join_cut(join: _Join, cut: int) -> None:
    found = _equal(join, cut) if join.key == "digests" else _near(join, cut)
    pairs = candidates.nearest_of(map(candidates.earlier, found) if join.is_within else found, MOST_NEAR)
    _write_groups(join.folder / f"near-{join.key}-{cut}", pairs, pairs["image"] // join.batch_images, join.num_ranges)


def _equal(join: _Join, cut: int) -> Iterator[Pairs]:
    for role, distance in (("bytes", candidates.EQUAL_BYTES), ("pixels", candidates.EQUAL_PIXELS)):
        own, theirs = join.entries("images", role, cut), join.entries("others", role, cut)
        table = candidates.Digests(theirs["words"], np.arange(len(theirs)))
        rows, places = table.equal(own["words"], is_swapped=False)
        yield make_pairs(_images(own[rows]), _images(theirs[places]), distance)


def _near(join: _Join, cut: int) -> Iterator[Pairs]:
    mask = mirrored(np.zeros(NUM_WORDS, np.uint64))
    for role, their_role in (("wholes", "parts"), ("parts", "wholes")):
        theirs = join.entries("others", their_role, cut)
        theirs = theirs[candidates.first_of_each(theirs["words"], theirs["code"] % _MOST_WINDOWS)]
        for is_mirrored in (False, True):
            change = mask * np.uint64(is_mirrored)
            own = join.entries("images", role, cut ^ int(join.cuts(change[:1])[0]))
            own["words"] ^= change
            for rows, places in _search(join, own, theirs):
                bits = distances(own["words"][rows], theirs["words"][places])
                kept = bits <= MOST_BITS
                one, other = own[rows[kept]], theirs[places[kept]]
                here = _WINDOWS[role][one["code"] % _MOST_WINDOWS]
                there = _WINDOWS[their_role][other["code"] % _MOST_WINDOWS]
                yield make_pairs(_images(one), _images(other), bits[kept], here, there, is_mirrored=is_mirrored)


def _align_range(join: _Join, number: int) -> Path:
    spilled = product(_KEYS, range(1 << join.cut_bits))
    every = (_group(join.folder / f"near-{key}-{cut}", number, PAIR) for key, cut in spilled)
    pairs = candidates.nearest_of(every, MOST_NEAR)
    is_equal = pairs["distance"] < 0
    near = pairs[~np.isin(pairs["image"], pairs["image"][is_equal])]
    found = [pairs[is_equal]]
    for start in range(0, len(near), _PAIRS_LOADED):
        some = near[start : start + _PAIRS_LOADED]
        images, others = join.images.thumbnails(some["image"]), join.others.thumbnails(some["other"])
        found.append(candidates.laid(some, images, others))
    file = join.folder / f"found-{number}.npy"
    np.save(file, candidates.nearest(np.concatenate(found), candidates.MOST_CANDIDATES))
    return file


def _search(join: _Join, own: _Entries, theirs: _Entries) -> Iterator[tuple[Int64s, Int64s]]:
    """Find hashes whose first words are near: positions on both sides."""
    (words, codes), (their_words, their_codes) = (
        (np.ascontiguousarray(each["words"][:, 0]), np.ascontiguousarray(each["code"])) for each in (own, theirs)
    )

    def compared(rows: Int64s, places: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        step = max(1, _CELLS // len(places))
        found, found_codes = their_words[places], their_codes[places]
        for at in range(0, len(rows), step):
            some, end = rows[at : at + step], len(places)
            if join.is_within:  # earlier ones alone
                end = int(np.searchsorted(found_codes, codes[some[-1]] // _MOST_WINDOWS * _MOST_WINDOWS))
            near = np.flatnonzero(np.bitwise_count(words[some][:, None] ^ found[:end]) <= MOST_FIRST)
            if len(near):
                row, place = np.divmod(near, end)
                yield some[row], places[place]

    for rows, places in _groups(join.values(words), join.values(their_words)):
        if len(places) <= _MOST_COMPARED:
            yield from compared(rows, places)
            continue
        for band in set(_BANDS) - {join.key}:
            keys, their_keys = _band(words[rows], band), _band(their_words[places], band)
            most = _MOST_COMPARED // (len(_BANDS) - 1)
            # as few bits more as will do
            left = next((left for left in range(15, 0, -1) if np.bincount(their_keys >> left).max() <= most), 0)
            for some, there in _groups(keys >> left, their_keys >> left):
                yield from compared(rows[some], places[there[:most]])


def _groups(keys: _Values, their_keys: _Values) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield positions on both sides for each key that both have, in their order."""
    order, their_order = np.argsort(keys, kind="stable"), np.argsort(their_keys, kind="stable")
    keys, their_keys = keys[order], their_keys[their_order]
    values, starts = np.unique(keys, return_index=True)
    lows, highs = (np.searchsorted(their_keys, values, side=side) for side in ("left", "right"))
    for start, end, low, high in np.stack([starts, np.append(starts, len(keys))[1:], lows, highs], axis=1).tolist():
        if low < high:
            yield order[start:end], their_order[low:high]


def _images(entries: _Entries) -> Int64s:
    return entries["code"] // _MOST_WINDOWS


def _band(words: NDArray[np.uint64], band: int) -> _Values:
    return (words >> np.uint64(_BAND_BITS * band)).astype(np.uint16)  # its stable sort is a radix sort


def _entries(words: NDArray[np.uint64], images: Int64s) -> _Entries:
    """Make entries of words [images, windows, 2], image by image."""
    found = np.empty(words.shape[:2], _ENTRY)
    found["words"] = words
    found["code"] = images[:, None] * _MOST_WINDOWS + np.arange(words.shape[1])
    return found.ravel()


def _write_groups(stem: Path, rows: NDArray[Any], groups: NDArray[Any], number: int) -> None:
    order = np.argsort(groups, kind="stable")
    np.save(f"{stem}.npy", rows[order])
    np.save(f"{stem}.starts.npy", np.searchsorted(groups[order], np.arange(number + 1)))


def _group(stem: Path, group: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    start, end = np.load(f"{stem}.starts.npy", mmap_mode="r")[group : group + 2].tolist()
    return np.load(f"{stem}.npy", mmap_mode="r")[start:end] if start < end else np.empty(0, dtype)
