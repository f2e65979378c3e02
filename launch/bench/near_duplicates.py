"""Near-duplicates planted into a data set: how many `check --against` finds, how many of those are true, and the cost.

Run `python -m launch.bench.near_duplicates DATA`; records/near_duplicates.txt has what it printed.

DATA with train/CLASS/*.jpg and test/CLASS/*.jpg, such as CIFAR-10 as images:

- Planted: test images, edited in one way each, among all training images: encoded again at quality 50, resized by 0.7
  or 1.4, mirrored, cropped by 5 % of each side. Beyond what is asked for: all of these together, and crops by 3 and
  10 %. All edited images but the first are JPEGs of quality 90.
- Recall: the share of planted images that are found with the image that they were made from, or with another test image
  that is itself found as a near-duplicate of that one.
- Precision: of what is found, the share that is planted or natural. Natural pairs are those that the same training set
  shows without anything planted; WORK/natural has them as pictures to look at, and --wrong takes how many of them
  are different pictures.

DATA a folder or a tar of photographs, a few hundred of any kind but none twice:

- Others: the photographs, and as many scenes (see `pictures`) on ten floors, which are plain areas of theirs.
- Images: copies of both, edited in one way each; and --scenes more scenes on the same floors, a third of them twins of
  the others: hard negatives, every two of a floor.
- Recall: the share of the copies of each edit that are found to be the same as the image that they were made from.
- Precision: of what is found to be the same, the share that is right. WORK/report has all as pictures.

Time: of each part, on one core and on all; the index with as many random hashes as --hashes says.
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
from data_shards.checking.near_duplicates.hash_index import HashIndex
from data_shards.checking.near_duplicates.matches import Matches, find_matches
from data_shards.checking.near_duplicates.page import write_report
from data_shards.checking.near_duplicates.perceptual_hash import PARTS, WHOLE
from data_shards.images.decode import USUAL_LIMIT
from launch.bench.pictures import edited, plain_floors, scenes

_EDITS = ("quality 50", "x 0.7", "x 1.4", "mirrored", "cropped 5 %", "all together", "cropped 3 %", "cropped 10 %")
_ASKED = 5
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


def plant(folder: Path, out: Path, *, each: int, seed: int) -> dict[str, tuple[str, Path]]:
    """Write edited test images into OUT; {name: (edit, original)}."""
    draw = np.random.default_rng(seed)
    originals = sorted((folder / "test").glob("*/*"))
    chosen = draw.permutation(len(originals))[: each * len(_EDITS)].reshape(len(_EDITS), each)
    planted: dict[str, tuple[str, Path]] = {}
    for edit, numbers in zip(_EDITS, chosen, strict=True):
        for number in numbers.tolist():
            original = originals[number]
            file = out / "planted" / f"{number:06d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            with Image.open(original) as image:
                file.write_bytes(edited(image, edit, draw))
            planted[_name(file)] = edit, original
    return planted


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
    write_report(work / "report", [found], limit=USUAL_LIMIT)
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


def by_name(found: Matches) -> dict[str, str]:
    """The name of each image that is the same as one of the others, and of that one."""
    same = (match for match in found.matches if match.kind != "unsure")
    return {found.place(match).key: found.other_place(match).key for match in same}


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
    parser.add_argument("data", type=Path, help="with train/CLASS/*.jpg and test/CLASS/*.jpg, or photographs")
    parser.add_argument("--work", type=Path, default=Path("near-duplicates"), help="folder to work in (%(default)s)")
    parser.add_argument("--each", type=int, default=1000, help="images planted with each edit (%(default)s)")
    parser.add_argument("--scenes", type=int, default=3000, help="hard negatives, with photographs (%(default)s)")
    parser.add_argument("--hashes", type=int, default=10**6, help="random ones to look up (%(default)s)")
    parser.add_argument("--wrong", type=int, default=0, help="natural pairs that are different pictures (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and of the crops (%(default)s)")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {version('numpy')}, {os.cpu_count()} cores")
    shutil.rmtree(args.work, ignore_errors=True)
    if not (args.data / "train").is_dir():
        measure_photographs(args.data, args.work, num_scenes=args.scenes, seed=args.seed)
        return
    planted = plant(args.data, args.work / "images", each=args.each, seed=args.seed)
    train, test = (sorted((args.data / split).glob("*/*")) for split in ("train", "test"))
    more = sorted((args.work / "images").glob("*/*"))
    hashes = args.work / "fingerprints"
    test_images, with_planted = _Files("test", test), _Files("train and planted", [*train, *more])
    found, seconds = compare(with_planted, test_images, hashes)
    _, again = compare(with_planted, test_images, hashes)
    natural, _ = compare(_Files("train", train), test_images, hashes)
    within, _ = compare(test_images, test_images, hashes)
    write_report(args.work / "natural", [natural], limit=USUAL_LIMIT)
    _print(found, natural, within, planted, wrong=args.wrong)
    images = sum(found.images.sizes)
    print(f"{images:,} images hashed and compared in {seconds:.0f} s on {os.cpu_count()} cores")
    print(f"again, with the hashes kept: {again:.0f} s")
    measure_index(args.hashes, indexed=50_000)


def _print(
    found: Matches, natural: Matches, within: Matches, planted: dict[str, tuple[str, Path]], *, wrong: int
) -> None:
    matched, naturally, alike = by_name(found), by_name(natural), by_name(within)
    unsure = sum(match.kind == "unsure" for match in found.matches)
    print(
        f"found: {len(matched):,} ({unsure:,} more unsure), of them planted {len(matched.keys() & planted.keys()):,}; ",
        end="",
    )
    print("without planting ", end="")
    print(f"{len(naturally):,} natural pairs, {wrong:,} of them different pictures when looked at")
    print(f"\n{'edit':14}{'planted':>9}{'found':>9}{'right':>9}{'recall':>9}")
    right_of_all = 0
    right_of_asked = planted_of_asked = 0
    for number, edit in enumerate(_EDITS):
        names = [name for name, (its, _) in planted.items() if its == edit]
        right = sum(_is_right(matched.get(name), _name(planted[name][1]), alike) for name in names)
        hit = sum(name in matched for name in names)
        right_of_all += right
        if number < _ASKED:
            right_of_asked, planted_of_asked = right_of_asked + right, planted_of_asked + len(names)
        print(f"{edit:14}{len(names):9,}{hit:9,}{right:9,}{right / len(names):9.4f}")
    others = matched.keys() - planted.keys()
    true = right_of_all + len(others & naturally.keys()) - wrong
    print(f"\nrecall of the first five: {right_of_asked / planted_of_asked:.4f}")
    print(f"precision: {true / len(matched):.4f} ({len(matched) - true:,} of {len(matched):,} are wrong)")


def _is_right(other: str | None, original: str, alike: dict[str, str]) -> bool:
    group: Sequence[str | None] = (original, alike.get(original))
    return other is not None and (other in group or alike.get(other) in group)


if __name__ == "__main__":
    main()
