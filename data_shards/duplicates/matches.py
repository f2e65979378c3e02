"""The images of one collection that are also in others: candidates by their fingerprints, then compared by pixels.

    equal-bytes     by 128 bits of SHA-256
    equal-pixels    both were decoded in full, and are equal
    near-duplicate  both were decoded, laid over each other and compared (see `likeness`)

Each image is listed once for each of the others, with its nearest match there. An image that cannot be decoded is
compared by its bytes alone, and counted. Needs 1.2 ms for a photograph on one core, once (see `fingerprint`), 25 us to
look it up among 10,000 others and 3 ms for each candidate: where one in twelve images has some, as in CIFAR-10, that is
the larger part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from data_shards.duplicates.candidates import EQUAL_BYTES, EQUAL_PIXELS, Pairs, find_candidates
from data_shards.duplicates.collection import Collection, ImagePlace
from data_shards.duplicates.fingerprint import (
    FingerprintRequest,
    Kind,
    default_fingerprint_folder,
    make_fingerprints,
)
from data_shards.duplicates.likeness import compare
from data_shards.errors import UnreadableImage
from data_shards.images.box import Pixels
from data_shards.images.decode import USUAL_LIMIT, PixelLimit, read_image
from data_shards.processes import num_cores, run_parts
from data_shards.progress_line import Progress

MatchKind = Literal["equal-bytes", "equal-pixels", "near-duplicate"]

_EQUAL: dict[int, MatchKind] = {EQUAL_BYTES: "equal-bytes", EQUAL_PIXELS: "equal-pixels"}
_PAIRS_AT_ONCE = 256
_WORTH_PROCESSES = 1024  # candidates: 4 s


class Match(NamedTuple):
    """An image, and the one that it is like; images are numbered through all parts of their collection.

    `likeness` (see there) is 1 for equal ones.
    """

    image: int
    other: int
    collection: int  # which of the others
    kind: MatchKind
    likeness: float
    mirrored: bool


@dataclass(frozen=True)
class Matches:
    """All matches, in the order of the images; `undecoded` counts the images of each collection that could not be,
    with those whose comparison ended with a crash of its process."""

    images: Collection
    others: tuple[Collection, ...]
    matches: tuple[Match, ...]
    undecoded: dict[str, int]

    def place(self, match: Match) -> ImagePlace:
        return place(self.images, match.image)

    def other_place(self, match: Match) -> ImagePlace:
        return place(self.others[match.collection], match.other)


def find_matches(
    images: Collection,
    others: Sequence[Collection],
    *,
    folder: Path | None = None,
    pixel_limit: PixelLimit = USUAL_LIMIT,
    processes: int | None = None,
    report: Callable[[str], None] = print,
) -> Matches:
    """Find the images that are also in `others`; of a collection with itself, those that are like an earlier one.

    Fingerprints are kept in `folder`, by default in the user's cache. With 1 for `processes`, none is started. Raises
    UserError if a part of a collection cannot be read.
    """
    processes = processes or num_cores()
    found: list[Match] = []
    undecoded: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="shardvit-") as scratch:
        num_images = sum(images.sizes)
        is_indexed = [sum(other.sizes) <= num_images for other in others]

        def fingerprints(collection: Collection, *, variants: bool) -> FingerprintRequest:
            kept = folder or default_fingerprint_folder()
            request = FingerprintRequest(collection, kept, Path(scratch), variants=variants, pixel_limit=pixel_limit)
            with Progress(sum(collection.sizes), report, doing=f"hashing {collection.name}") as progress:
                make_fingerprints(request, processes=processes, done=progress.add)
            if bad := sum(_undecoded(request)):
                undecoded[collection.name] = bad
            return request

        own = fingerprints(images, variants=not all(is_indexed))
        for number, (other, indexed) in enumerate(zip(others, is_indexed, strict=True)):
            theirs = fingerprints(other, variants=indexed)
            streamed = sum(images.sizes) if indexed else sum(other.sizes)
            with Progress(streamed, report, doing=f"comparing with {other.name}") as progress:
                pairs = find_candidates(own, theirs, threads=processes, done=progress.add)
            request = _Comparing(images, other, number, pixel_limit)
            compared, crashed = _compared(request, pairs, processes=processes, report=report)
            found += compared
            if crashed:
                undecoded[images.name] = undecoded.get(images.name, 0) + crashed
    found.sort(key=lambda match: (match.image, match.collection))
    return Matches(images, tuple(others), tuple(found), undecoded)


def place(collection: Collection, number: int) -> ImagePlace:
    """Where an image is; `number` counts through all parts."""
    return collection.place(*_located(collection, number))


def read(collection: Collection, number: int) -> bytes:
    """An image as stored. Raises UnreadableImage."""
    return collection.read(*_located(collection, number))


def _located(collection: Collection, number: int) -> tuple[int, int]:
    starts = np.cumsum([0, *collection.sizes])
    part = int(np.searchsorted(starts, number, side="right")) - 1
    return part, number - int(starts[part])


def _undecoded(request: FingerprintRequest) -> Iterator[int]:
    for part in range(len(request.collection.sizes)):
        yield int((request.load(part).rows["kind"] >= Kind.NOTHING).sum())


@dataclass(frozen=True)
class _Comparing:
    images: Collection
    other: Collection
    number: int  # of the other one
    pixel_limit: PixelLimit

    def pixels(self, collection: Collection, number: int) -> Pixels:
        return read_image(read(collection, number), limit=self.pixel_limit).pixels()


_Candidates = tuple[tuple[int, tuple[int, ...]], ...]  # (image, others, the nearest first), ...


def _compared(
    request: _Comparing, pairs: Pairs, *, processes: int, report: Callable[[str], None]
) -> tuple[list[Match], int]:
    """The matches, and the number of images that were to be compared by a process that crashed."""
    by_image: dict[int, list[tuple[int, int]]] = {}
    for image, other, distance in pairs.tolist():
        by_image.setdefault(image, []).append((other, distance))
    matches: list[Match] = []
    candidates: list[tuple[int, tuple[int, ...]]] = []
    for image, near in by_image.items():
        other, distance = near[0]  # the nearest
        if distance in _EQUAL:
            matches.append(Match(image, other, request.number, _EQUAL[distance], 1.0, mirrored=False))
        else:
            candidates.append((image, tuple(other for other, _ in near)))
    chunks = [tuple(candidates[at : at + _PAIRS_AT_ONCE]) for at in range(0, len(candidates), _PAIRS_AT_ONCE)]
    if "threads" in (request.images.read_by, request.other.read_by) or len(candidates) < _WORTH_PROCESSES:
        processes = 1
    with Progress(len(candidates), report, doing="comparing candidates") as progress:
        found = run_parts(
            _compare_chunk, request, chunks, processes=processes, done=lambda done: progress.add(done.images)
        )
    for done in found.values():
        matches += done.matches
    return matches, len(candidates) - sum(done.images for done in found.values())


class _Done(NamedTuple):
    images: int
    matches: tuple[Match, ...]


def _compare_chunk(request: _Comparing, chunk: _Candidates) -> _Done:
    matches = (_best(request, image, near) for image, near in chunk)
    return _Done(len(chunk), tuple(match for match in matches if match is not None))


def _best(request: _Comparing, image: int, near: Sequence[int]) -> Match | None:
    """The first of the candidates, nearest first, that is the same picture."""
    pixels = None
    for other in near:
        try:
            pixels = request.pixels(request.images, image) if pixels is None else pixels
            others = request.pixels(request.other, other)
        except UnreadableImage:  # what the reduced decoding of JPEGs did not notice
            continue
        if pixels.shape == others.shape and np.array_equal(pixels, others):
            return Match(image, other, request.number, "equal-pixels", 1.0, mirrored=False)
        found = compare(pixels, others)
        if found.is_same_picture:
            likeness = round(found.likeness, 4)
            return Match(image, other, request.number, "near-duplicate", likeness, found.mirrored)
    return None
