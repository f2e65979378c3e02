"""Find images that other collections contain: candidates by fingerprints, then compared by pixels.

    equal-bytes     equal in 128 bits of SHA-256
    equal-pixels    equal, both decoded in full
    near-duplicate  decoded and aligned, the same picture (see `likeness`)
    unsure          decoded and aligned, much alike: worth inspecting, not counted as the same

Each image is listed once per other collection, with its nearest match. An undecodable image is compared by its bytes
alone, and counted. On one core a photograph takes 1.2 ms once (see `fingerprint`), 0.6 to look up among 350 others, 1.8
among 50,000, and 7 per candidate, 3 of them to decode both.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from shardvit.data_shards.checking.near_duplicates.candidates import (
    EQUAL_BYTES,
    EQUAL_PIXELS,
    PAIR,
    Pairs,
    find_candidates,
)
from shardvit.data_shards.checking.near_duplicates.fingerprint import (
    Collection,
    FingerprintRequest,
    ImagePlace,
    Kind,
    default_fingerprint_folder,
    make_fingerprints,
)
from shardvit.data_shards.checking.near_duplicates.likeness import DECODED_PIXELS, compare
from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.images.decode import USUAL_LIMIT, PixelLimit, read_image, read_reduced
from shardvit.data_shards.processes import num_cores, run_parts
from shardvit.data_shards.progress_line import Progress

MatchKind = Literal["equal-bytes", "equal-pixels", "near-duplicate", "unsure"]
MATCH_KINDS: tuple[MatchKind, ...] = get_args(MatchKind)

_EQUAL: dict[int, MatchKind] = {EQUAL_BYTES: "equal-bytes", EQUAL_PIXELS: "equal-pixels"}
_IMAGES_AT_ONCE = 256
_MAY_BE_EQUAL = 0.999  # likeness
_WORTH_PROCESSES = 1024  # images with candidates: 4 s


class Match(NamedTuple):
    """An image and its match, numbered across the parts of their collections; `likeness` is 1 if equal."""

    image: int
    other: int
    collection: int  # index of the other collection
    kind: MatchKind
    likeness: float
    mirrored: bool


@dataclass(frozen=True)
class Matches:
    """All matches, kind by kind, the most alike first."""

    images: Collection
    others: tuple[Collection, ...]
    matches: tuple[Match, ...]
    undecoded: dict[str, int]  # collection -> number of images undecodable or lost to a crash

    def line(self, match: Match) -> dict[str, object]:
        return {
            "image": self.place(match)._asdict(),
            "other": self.other_place(match)._asdict(),
            "against": self.others[match.collection].name,
            "kind": match.kind,
            "likeness": match.likeness,
            "mirrored": match.mirrored,
        }

    def place(self, match: Match) -> ImagePlace:
        return place(self.images, match.image)

    def other_place(self, match: Match) -> ImagePlace:
        return place(self.others[match.collection], match.other)


def find_matches(
    images: Collection,
    others: Sequence[Collection],
    *,
    folder: Path | None = None,  # of fingerprints; default: in the user's cache
    pixel_limit: PixelLimit = USUAL_LIMIT,
    processes: int | None = None,
    report: Callable[[str], None] = print,
) -> Matches:
    """Find images that are also in `others`, or earlier in the same collection; UserError if a part cannot be read."""
    processes = processes or num_cores()
    found: list[Match] = []
    undecoded: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="shardvit-") as scratch:

        def fingerprints(collection: Collection) -> FingerprintRequest:
            kept = folder or default_fingerprint_folder()
            request = FingerprintRequest(collection, kept, Path(scratch), pixel_limit)
            with Progress(sum(collection.sizes), report, status=f"hashing {collection.name}") as progress:
                make_fingerprints(request, processes=processes, done=progress.add)
            kinds = (request.load(part).rows["kind"] for part in range(len(collection.sizes)))
            if bad := sum(int((each >= Kind.NOTHING).sum()) for each in kinds):
                undecoded[collection.name] = bad
            return request

        own = fingerprints(images)
        for number, other in enumerate(others):
            theirs = fingerprints(other)
            streamed = max(sum(images.sizes), sum(other.sizes))
            with Progress(streamed, report, status=f"comparing with {other.name}") as progress:
                pairs = find_candidates(own, theirs, threads=processes, done=progress.add)
            request = _Comparing(images, other, number, pixel_limit)
            compared, crashed = _compared(request, pairs, processes=processes, report=report)
            found += compared
            if crashed:
                undecoded[images.name] = undecoded.get(images.name, 0) + crashed
    found.sort(key=lambda match: (MATCH_KINDS.index(match.kind), -match.likeness, match.image, match.collection))
    return Matches(images, tuple(others), tuple(found), undecoded)


def place(collection: Collection, number: int) -> ImagePlace:
    """Locate an image by its number across parts."""
    return collection.place(*_located(collection, number))


def read(collection: Collection, number: int) -> bytes:
    """Read an encoded image; UnreadableImage if that fails."""
    return collection.read(*_located(collection, number))


def _located(collection: Collection, number: int) -> tuple[int, int]:
    starts = np.cumsum([0, *collection.sizes])
    part = int(np.searchsorted(starts, number, side="right")) - 1
    return part, number - int(starts[part])


@dataclass(frozen=True)
class _Comparing:
    images: Collection
    other: Collection
    number: int  # of the other collection
    pixel_limit: PixelLimit

    def reduced(self, data: bytes) -> tuple[int, int, Pixels]:
        return read_reduced(data, least_pixels=DECODED_PIXELS, colours="RGB", limit=self.pixel_limit)

    def are_equal(self, one: bytes, other: bytes) -> bool:
        first, second = (read_image(data, limit=self.pixel_limit).pixels() for data in (one, other))
        return np.array_equal(first, second)


def _compared(
    request: _Comparing, pairs: Pairs, *, processes: int, report: Callable[[str], None]
) -> tuple[list[Match], int]:
    """Return matches, and how many images were lost to crashes."""
    starts = np.unique(pairs["image"], return_index=True)[1]  # of each image, at its nearest candidate
    is_equal = pairs["distance"][starts] < 0
    matches = [
        Match(image, other, request.number, _EQUAL[distance], 1.0, mirrored=False)
        for image, other, distance, *_ in pairs[starts[is_equal]].tolist()
    ]
    candidates = pairs[np.repeat(~is_equal, np.diff(np.append(starts, len(pairs))))]
    starts = np.unique(candidates["image"], return_index=True)[1]
    chunks = [chunk.tobytes() for chunk in np.split(candidates, starts[_IMAGES_AT_ONCE::_IMAGES_AT_ONCE])]
    if "threads" in (request.images.read_by, request.other.read_by) or len(starts) < _WORTH_PROCESSES:
        processes = 1
    with Progress(len(starts), report, status="comparing candidates") as progress:
        found = run_parts(
            _compare_chunk, request, chunks, processes=processes, done=lambda found: progress.add(len(found))
        )
    matches += [match for each in found.values() for match in each if match is not None]
    return matches, len(starts) - sum(map(len, found.values()))


def _compare_chunk(request: _Comparing, chunk: bytes) -> list[Match | None]:
    pairs = np.frombuffer(chunk, PAIR)
    images = np.split(pairs, np.unique(pairs["image"], return_index=True)[1][1:]) if len(pairs) else []
    return [_best(request, near) for near in images]


def _best(request: _Comparing, near: Pairs) -> Match | None:
    """Take the nearest candidate that is the same picture, else the most alike unsure one."""
    unsure: list[Match] = []
    image = int(near["image"][0])
    data = pixels = None
    for pair in near:
        other = int(pair["other"])
        try:
            data = read(request.images, image) if data is None else data
            pixels = request.reduced(data) if pixels is None else pixels
            other_data = read(request.other, other)
            others = request.reduced(other_data)
            mirrored = bool(pair["mirrored"])
            one = pixels[2][:, ::-1] if mirrored else pixels[2]
            found = compare(one, others[2], here=pair["here"], there=pair["there"])
            match = partial(Match, image, other, request.number, mirrored=mirrored)
            may_be_equal = pixels[:2] == others[:2] and found.likeness > _MAY_BE_EQUAL
            if may_be_equal and request.are_equal(data, other_data):
                return match("equal-pixels", 1.0, mirrored=False)
        except UnreadableImage:  # damage that reduced JPEG decoding did not notice
            continue
        likeness = round(found.likeness, 4)
        if found.answer == "same":
            return match("near-duplicate", likeness)
        if found.answer == "unsure":
            unsure.append(match("unsure", likeness))
    return max(unsure, key=lambda match: match.likeness, default=None)
