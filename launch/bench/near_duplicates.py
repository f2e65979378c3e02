"""Near-duplicates planted into a data set: how many `check --against` finds, how many of those are true, and the cost.

Run `python -m launch.bench.near_duplicates FOLDER`, FOLDER with train/CLASS/*.jpg and test/CLASS/*.jpg (CIFAR-10 as
images); records/near_duplicates.txt has what it printed.

- Planted: test images, edited in one way each, among all training images: encoded again at quality 50, resized by 0.7
  or 1.4, mirrored, cropped by 5 % of each side. Beyond what is asked for: all of these together, and crops by 3 and
  10 %. All edited images but the first are JPEGs of quality 90.
- Recall: the share of planted images that are found with the image that they were made from, or with another test image
  that is itself found as a near-duplicate of that one.
- Precision: of what is found, the share that is planted or natural. Natural pairs are those that the same training set
  shows without anything planted; WORK/natural has them as pictures to look at, and --wrong takes how many of them
  are different pictures.
- Time: of each part, on one core and on all; the index with as many random hashes as --hashes says.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import shutil
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from data_shards.duplicates.collection import ImagePlace
from data_shards.duplicates.hash_index import HashIndex
from data_shards.duplicates.matches import Matches, find_matches
from data_shards.duplicates.page import write_report
from data_shards.duplicates.perceptual_hash import NUM_VARIANTS
from data_shards.images.decode import USUAL_LIMIT

_EDITS = ("quality 50", "x 0.7", "x 1.4", "mirrored", "cropped 5 %", "all together", "cropped 3 %", "cropped 10 %")
_ASKED = 5
_PART = 1000  # files


def edited(data: bytes, edit: str, *, draw: np.random.Generator) -> bytes:
    """A test image, edited."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    everything = edit == "all together"
    if edit.startswith("cropped") or everything:
        share = 0.05 if everything else int(edit.split()[1]) / 100
        width, height = (round(side * (1 - share)) for side in image.size)
        left, top = int(draw.integers(image.width - width + 1)), int(draw.integers(image.height - height + 1))
        image = image.crop((left, top, left + width, top + height))
    if edit == "mirrored" or everything:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if edit.startswith("x ") or everything:
        factor = 0.7 if everything else float(edit[2:])
        width, height = (round(side * factor) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=50 if edit == "quality 50" or everything else 90)
    return stream.getvalue()


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
            file.write_bytes(edited(original.read_bytes(), edit, draw=draw))
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


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(repr(list(map(str, files))).encode()).hexdigest()


def compare(images: _Files, other: _Files, folder: Path) -> tuple[Matches, float]:
    """The matches, and the seconds that they took."""
    begin = time.perf_counter()
    return find_matches(images, [other], folder=folder, report=lambda line: None), time.perf_counter() - begin


def by_name(found: Matches) -> dict[str, str]:
    """The name of each image, and of its match."""
    return {found.place(match).key: found.other_place(match).key for match in found.matches}


def _name(file: Path) -> str:
    return f"{file.parent.name}_{file.stem}"


def measure_index(hashes: int, *, indexed: int) -> None:
    """Look up random hashes among the variants of `indexed` random images."""
    draw = np.random.default_rng(0)
    begin = time.process_time()
    index = HashIndex(draw.integers(0, 1 << 63, (indexed * NUM_VARIANTS, 2), dtype=np.uint64))
    built = time.process_time() - begin
    begin = time.process_time()
    for _ in range(0, hashes, 1000):
        index.near(draw.integers(0, 1 << 63, (1000, 2), dtype=np.uint64))
    used = time.process_time() - begin
    print(
        f"index of {indexed:,} random images: built in {built:.2f} s, {hashes:,} random hashes looked up "
        f"in {used:.1f} s of one core, {1e6 * used / hashes:.1f} us each; "
        f"10^8 images, each with its mirror image: {2e8 * used / hashes / 3600:.1f} h"
    )


def main() -> None:
    """Print recall, precision and cost."""
    parser = argparse.ArgumentParser(description="Recall and precision of near-duplicates that are planted.")
    parser.add_argument("folder", type=Path, help="with train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--work", type=Path, default=Path("near-duplicates"), help="folder to work in (%(default)s)")
    parser.add_argument("--each", type=int, default=1000, help="images planted with each edit (%(default)s)")
    parser.add_argument("--hashes", type=int, default=10**6, help="random ones to look up (%(default)s)")
    parser.add_argument("--wrong", type=int, default=0, help="natural pairs that are different pictures (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and of the crops (%(default)s)")
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {version('numpy')}, {os.cpu_count()} cores")
    shutil.rmtree(args.work, ignore_errors=True)
    planted = plant(args.folder, args.work / "images", each=args.each, seed=args.seed)
    train, test = (sorted((args.folder / split).glob("*/*")) for split in ("train", "test"))
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
    print(
        f"found: {len(matched):,}, of them planted {len(matched.keys() & planted.keys()):,}; without planting ", end=""
    )
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
