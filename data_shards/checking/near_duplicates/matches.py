"""Find images that other collections contain: candidates by fingerprints, then compared by pixels.

    equal-bytes     equal in 128 bits of SHA-256
    equal-pixels    equal, both decoded in full
    near-duplicate  decoded and aligned, the same picture (see `likeness`)
    unsure          decoded and aligned, much alike: worth inspecting, not counted as the same
    semantic        alike by a model's features: found by pipeline/transfer/semantic.py, not here

Each image is listed once per other collection, with its nearest match. An undecodable image is compared by its bytes
alone, and counted. On one core a photograph takes 1.2 ms once (see `fingerprint`), 0.6 to look up among 350 others, 1.8
among 50,000, and 7 per candidate, 3 of them to decode both. If the smaller side has 500,000 images or more, candidates
come from `disk_join`, which knows fewer crops. Fingerprints, second looks and that join are an engine's parts; only
matches (200 bytes each) are held here.
"""

import shutil
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
    Pairs,
    find_candidates,
)
from shardvit.data_shards.checking.near_duplicates.disk_join import find_on_disk
from shardvit.data_shards.checking.near_duplicates.fingerprint import (
    Collection,
    FingerprintRequest,
    ImagePlace,
    KeptFingerprints,
    default_fingerprint_folder,
    make_fingerprints,
)
from shardvit.data_shards.checking.near_duplicates.likeness import DECODED_PIXELS, compare
from shardvit.data_shards.engines.engine import PartsEngine, local_engine
from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.images.decode import USUAL_LIMIT, PixelLimit, read_image, read_reduced
from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.progress_line import Progress

MatchKind = Literal["equal-bytes", "equal-pixels", "near-duplicate", "unsure", "semantic"]
MATCH_KINDS: tuple[MatchKind, ...] = get_args(MatchKind)

_Chunk = tuple[Path, int, int]  # a file of pairs, and which of them
_EQUAL: dict[int, MatchKind] = {EQUAL_BYTES: "equal-bytes", EQUAL_PIXELS: "equal-pixels"}
_IMAGES_AT_ONCE = 256
_MAY_BE_EQUAL = 0.999  # likeness
_JOINED_ON_DISK = 500_000  # images of the smaller side
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
    folder: Path | None = None,  # of fingerprints, seen by all workers; default: in the user's cache
    pixel_limit: PixelLimit = USUAL_LIMIT,
    engine: PartsEngine | None = None,
    report: Callable[[str], None] = print,
) -> Matches:
    """Find images that are also in `others`, or earlier in the same collection; UserError if a part cannot be read."""
    engine, kept = engine or local_engine(), folder or default_fingerprint_folder()
    found: list[Match] = []
    undecoded: dict[str, int] = {}
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="comparing-", dir=kept) as scratch:

        def fingerprints(collection: Collection) -> KeptFingerprints:
            request = FingerprintRequest(collection, kept, Path(scratch), pixel_limit)
            with Progress(sum(collection.sizes), report, status=f"hashing {collection.name}") as progress:
                made, bad = make_fingerprints(request, engine=engine, done=progress.add)
            if bad:
                undecoded[collection.name] = bad
            return made

        own = fingerprints(images)
        for number, other in enumerate(others):
            theirs = fingerprints(other)
            folder = Path(scratch) / f"{number}"
            folder.mkdir()
            if min(sum(images.sizes), sum(other.sizes)) >= _JOINED_ON_DISK:
                files = find_on_disk(own, theirs, folder=folder, engine=engine, report=report)
            else:
                streamed = max(sum(images.sizes), sum(other.sizes))
                threads = min(engine.workers, num_cores())
                with Progress(streamed, report, status=f"comparing with {other.name}") as progress:
                    pairs = find_candidates(own, theirs, threads=threads, done=progress.add)
                files = [folder / "pairs.npy"]
                np.save(files[0], pairs)
            request = _Comparing(images, other, number, pixel_limit)
            compared, crashed = _compared(request, files, engine=engine, report=report)
            found += compared
            if crashed:
                undecoded[images.name] = undecoded.get(images.name, 0) + crashed
            shutil.rmtree(folder)
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
    request: _Comparing, files: Sequence[Path], *, engine: PartsEngine, report: Callable[[str], None]
) -> tuple[list[Match], int]:
    """Return matches, and how many images were lost to crashes; `files` have pairs, each image's in one of them."""
    matches: list[Match] = []
    chunks: list[_Chunk] = []
    total = 0
    for file in files:
        pairs = np.load(file)
        starts = np.unique(pairs["image"], return_index=True)[1]  # of each image, at its nearest candidate
        is_equal = pairs["distance"][starts] < 0
        matches += [
            Match(image, other, request.number, _EQUAL[distance], 1.0, mirrored=False)
            for image, other, distance, *_ in pairs[starts[is_equal]].tolist()
        ]
        ends = np.append(starts, len(pairs))[1:]
        starts, ends = starts[~is_equal], ends[~is_equal]
        total += len(starts)
        for at in range(0, len(starts), _IMAGES_AT_ONCE):
            chunks.append((file, int(starts[at]), int(ends[at : at + _IMAGES_AT_ONCE][-1])))
    if "threads" in (request.images.read_by, request.other.read_by) or total < _WORTH_PROCESSES:
        engine = local_engine(1)
    with Progress(total, report, status="comparing candidates") as progress:
        found = engine.run(_compare_chunk, request, chunks, done=lambda found: progress.add(len(found)))
    matches += [match for each in found.values() for match in each if match is not None]
    return matches, total - sum(map(len, found.values()))


def _compare_chunk(request: _Comparing, chunk: _Chunk) -> list[Match | None]:
    file, start, end = chunk
    pairs: Pairs = np.array(np.load(file, mmap_mode="r")[start:end])
    images = np.split(pairs, np.unique(pairs["image"], return_index=True)[1][1:])
    return [_best(request, near) for near in images if near["distance"][0] >= 0]  # not those with an equal one


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
