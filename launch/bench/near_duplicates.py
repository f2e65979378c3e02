"""Plant near-duplicates into photographs: how many `check --against` finds, how many of those are true, and the cost.

Run `python -m launch.bench.near_duplicates DATA`; records/near_duplicates.txt has what it printed. DATA is a folder
or a tar of photographs, a few hundred of any kind but none twice.

- Others: the photographs, and as many scenes (see `pictures`) on ten floors, which are plain areas of theirs.
- Images: copies of both, edited in one way each; and --scenes more scenes on the same floors, a third of them twins of
  the others: hard negatives, every two of a floor.
- Recall: the share of the copies of each edit that are found to be the same as their original.
- Precision: the share of what is found to be the same that is right. WORK/report shows all as pictures.

Time: the whole comparison, and look-ups in an index of random hashes (--hashes).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import tarfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from data_shards.checking.near_duplicates.collection import ImagePlace
from data_shards.checking.near_duplicates.matches import Matches, find_matches
from data_shards.checking.near_duplicates.perceptual_hash import PARTS, WHOLE, HashIndex
from data_shards.images.decode import USUAL_LIMIT
from launch.bench.pictures import edited, plain_floors, scenes
from launch.pages.duplicates_page import MATCHES_PAGE, write_duplicates

_OF_PHOTOGRAPHS = (
    *("quality 50", "quality 30", "x 0.5", "x 1.5", "mirrored", "grey", "square", "border"),
    *("cropped 5 %", "cropped 10 %", "cropped 20 %", "cropped 30 %"),
)
_BEYOND = (
    *("mirrored, cropped 20 %, grey, quality 50", "square, inner 88 %, 224 x 224", "64 x 64, quality 75"),
    *("cropped 40 %", "tinted", "lettered", "turned 3"),
)
_FLOORS = 10
_SIZE = (360, 480)  # of a scene
_PART = 1000  # files


class _Files:
    """Image files as a collection."""

    read_by: Literal["processes", "threads"] = "processes"

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name, self._files = name, files
        self.digest = _digest(files)
        self.sizes = [min(_PART, len(files) - at) for at in range(0, len(files), _PART)]

    def part_digest(self, part: int) -> str:
        return _digest(self._files[part * _PART : (part + 1) * _PART])

    def read(self, part: int, row: int) -> bytes:
        return self._files[part * _PART + row].read_bytes()

    def place(self, part: int, row: int) -> ImagePlace:
        return ImagePlace(self.name, _name(self._files[part * _PART + row]))


def plant_photographs(data: Path, out: Path, *, num_scenes: int, seed: int) -> dict[str, tuple[str, str]]:
    """Write both sides into OUT/images and OUT/others; {name of a copy: (edit, name of its original)}."""
    if data.is_dir():
        photographs = data
    else:
        photographs = out / "photographs"
        with tarfile.open(data) as archive:
            archive.extractall(photographs, filter="data")
    files = sorted(path for path in photographs.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    floors = plain_floors(files, _FLOORS, size=_SIZE)
    for side in ("images", "others"):
        (out / side).mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        shutil.copy(file, out / "others" / f"photograph-{number:05d}.jpg")
    for number, image in enumerate(scenes(floors, len(files), seed=seed)):
        image.save(out / "others" / f"scene-{number:05d}.jpg", quality=90)
    hard = scenes(floors, num_scenes // 3, seed=seed, twins=True) + scenes(
        floors, num_scenes - num_scenes // 3, seed=seed + 1
    )
    for number, image in enumerate(hard):
        image.save(out / "images" / f"hard-{number:05d}.jpg", quality=90)
    draw = np.random.default_rng(seed)
    planted: dict[str, tuple[str, str]] = {}
    for number, edit in enumerate((*_OF_PHOTOGRAPHS, *_BEYOND)):
        for original in sorted((out / "others").iterdir()):
            copy = f"{number:02d}-{original.stem}"
            with Image.open(original) as image:
                (out / "images" / f"{copy}.jpg").write_bytes(edited(image, edit, draw))
            planted[copy] = edit, original.stem
    return planted


def measure_photographs(data: Path, work: Path, *, num_scenes: int, seed: int) -> None:
    """Plant, compare and print."""
    planted = plant_photographs(data, work, num_scenes=num_scenes, seed=seed)
    images, others = (_Files(side, sorted((work / side).iterdir())) for side in ("images", "others"))
    found, seconds = compare(images, others, work / "fingerprints")
    (work / "report").mkdir(exist_ok=True)
    write_duplicates(work / "report" / MATCHES_PAGE, [found], USUAL_LIMIT)
    answers = {
        found.place(match).key.partition("_")[2]: (match.kind, found.other_place(match).key.partition("_")[2])
        for match in found.matches
    }
    num_others, num_images = sum(others.sizes), sum(images.sizes)
    print(f"{num_others:,} others, half of them scenes; {num_images:,} images, {num_scenes:,} hard negatives")
    print(f"\n{'':40}{'':11}photographs{'':9}scenes")
    print(f"{'edit':40}{'recall':>11}{'unsure':>9}{'recall':>11}{'unsure':>9}{'wrong':>7}")
    right = wrong = unsure_wrong = 0
    for edit in (*_OF_PHOTOGRAPHS, *_BEYOND):
        cells = ""
        wrong_of_edit = 0
        for kind in ("photograph", "scene"):
            copies = {copy: name for copy, (its, name) in planted.items() if its == edit and name.startswith(kind)}
            both = [(*answers[copy], name) for copy, name in copies.items() if copy in answers]
            told = [answer for answer, other, name in both if other == name]
            of_others = [answer for answer, other, name in both if other != name]
            same = len(told) - told.count("unsure")
            right += same
            wrong_of_edit += len(of_others) - of_others.count("unsure")
            unsure_wrong += of_others.count("unsure")
            cells += f"{same / len(copies):11.4f}{told.count('unsure') / len(copies):9.4f}"
        wrong += wrong_of_edit
        print(f"{edit:40}{cells}{wrong_of_edit:7,}")
    hard = [answers[name][0] for name in answers.keys() - planted.keys()]
    wrong_hard = sum(kind != "unsure" for kind in hard)
    print(f"\nhard negatives: {wrong_hard:,} found to be the same, {hard.count('unsure'):,} unsure")
    print(f"copies with another image than their own: {wrong:,} found to be the same, {unsure_wrong:,} unsure")
    told = right + wrong + wrong_hard
    print(f"precision: {right / told:.4f} ({wrong + wrong_hard:,} of {told:,} wrong)")
    print(f"{num_images + num_others:,} images hashed and compared in {seconds:.0f} s on {os.cpu_count()} cores")


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(repr(list(map(str, files))).encode()).hexdigest()


def compare(images: _Files, other: _Files, folder: Path) -> tuple[Matches, float]:
    """The matches, and the seconds that they took."""
    begin = time.perf_counter()
    return find_matches(images, [other], folder=folder, report=lambda line: None), time.perf_counter() - begin


def _name(file: Path) -> str:
    return f"{file.parent.name}_{file.stem}"


def measure_index(hashes: int, *, indexed: int) -> None:
    """Look up random hashes among those of `indexed` random images."""
    draw = np.random.default_rng(0)
    of_image = 0.0
    for own, theirs in ((WHOLE, PARTS), (PARTS, WHOLE)):
        begin = time.process_time()
        index = HashIndex(draw.integers(0, 1 << 63, (indexed * len(theirs), 2), dtype=np.uint64))
        built = time.process_time() - begin
        begin = time.process_time()
        for _ in range(0, hashes, 1000):
            index.near(draw.integers(0, 1 << 63, (1000, 2), dtype=np.uint64))
        each = (time.process_time() - begin) / hashes
        of_image += each * 2 * len(own)  # and of the mirror image
        print(
            f"index of {indexed:,} random images, {len(theirs)} hashes each: built in {built:.2f} s; "
            f"{1e6 * each:.1f} us of one core a look-up"
        )
    print(
        f"all look-ups of an image and its mirror image: {1e3 * of_image:.2f} ms; 10^6: {1e6 * of_image / 3600:.1f} h"
    )


def main() -> None:
    """Print recall, precision and cost."""
    parser = argparse.ArgumentParser(description="Recall and precision of near-duplicates that are planted.")
    parser.add_argument("data", type=Path, help="a folder or a tar of photographs")
    parser.add_argument("--work", type=Path, default=Path("near-duplicates"), help="folder to work in (%(default)s)")
    parser.add_argument("--scenes", type=int, default=3000, help="hard negatives (%(default)s)")
    parser.add_argument("--hashes", type=int, default=10**6, help="random ones to look up (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and of the crops (%(default)s)")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {version('numpy')}, {os.cpu_count()} cores")
    shutil.rmtree(args.work, ignore_errors=True)
    measure_photographs(args.data, args.work, num_scenes=args.scenes, seed=args.seed)
    measure_index(args.hashes, indexed=50_000)


if __name__ == "__main__":
    main()
