"""Google's data path compared with TensorFlow's own operations: crops over 100,000 boxes a shape, and resized pixels.

TensorFlow is not among our packages, so this has two halves, and `records/google_path.txt` what the second printed:

    ANOTHER_ENVIRONMENT/bin/python -m launch.bench.google_path theirs theirs.npz PHOTOGRAPH.jpg...
    python -m launch.bench.google_path compare theirs.npz

The first needs TensorFlow and NumPy. It draws boxes as google-research/vision_transformer and big_vision do, and
decodes and resizes the photographs by their calls. The second draws as many boxes of ours and compares: shares of the
image's area, ratios, heights, and places among those that the box leaves, each by a two-sample Kolmogorov-Smirnov test
(heights also by chi-square over their ten tenths); then pixels, in decibels and levels of 255. Costs two minutes each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from data_shards.images.box import Pixels

_BOXES = 100_000
_SHAPES = ((375, 500), (500, 333), (500, 500), (32, 32), (224, 1000), (60, 1500))  # height and width in pixels
_AREA, _RATIO = (0.05, 1.0), (0.75, 1.33)
_SIDES = (224, 384)  # of the squares that are compared
_SMALL = 256  # the short side of big_vision's evaluation


def theirs(out: Path, photographs: list[Path]) -> None:
    """TensorFlow's boxes [n, 4] of each shape (top, left, height, width), and pixels of each photograph."""
    import tensorflow as tf

    tf.random.set_seed(0)
    kept: dict[str, Any] = {"version": tf.__version__}

    @tf.function
    def box(shape: Any) -> Any:
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape,
            tf.zeros([0, 0, 4], tf.float32),
            area_range=_AREA,
            min_object_covered=0,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], size[:2]], axis=0)

    for height, width in _SHAPES:
        shape = tf.constant([height, width, 3])
        boxes = tf.data.Dataset.range(_BOXES).map(lambda _, shape=shape: box(shape)).batch(_BOXES)
        kept[f"boxes_{height}_{width}"] = next(iter(boxes)).numpy()
    for number, path in enumerate(photographs):
        data = path.read_bytes()
        kept[f"jpeg_{number}"] = np.frombuffer(data, np.uint8)
        kept[f"decoded_{number}"] = tf.io.decode_image(data, channels=3, expand_animations=False).numpy()
        precise = tf.image.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE")
        kept[f"precise_{number}"] = precise.numpy()
        for side in _SIDES:
            kept[f"bilinear_{number}_{side}"] = tf.image.resize(precise, (side, side)).numpy()
        factor = np.float32(_SMALL) / np.float32(min(precise.shape[:2]))
        small = [int(np.round(np.float32(length) * factor)) for length in precise.shape[:2]]
        for name, size in (("down", small), ("up", [2 * length + 77 for length in precise.shape[:2]])):
            kept[f"area_{name}_{number}"] = tf.image.resize(precise, size, method="area").numpy()
    np.savez(out, **kept)


def compare(path: Path) -> None:
    """Print how ours differ."""
    held = np.load(path)
    print(f"TensorFlow {held['version']}; {_BOXES:,} boxes of each shape, theirs and ours")
    print("p of the two-sample tests that both follow one law; shares of the whole image's area\n")
    print(f"{'height x width':16}{'share':>8}{'ours':>8}{'whole':>8}{'ours':>8}  p:", end="")
    print("".join(f"{name:>8}" for name in ("share", "ratio", "height", "chi2", "top", "left")))
    for height, width in _SHAPES:
        _compare_boxes(held[f"boxes_{height}_{width}"], height=height, width=width)
    print("\npixels: decibels between theirs and ours; mean and largest difference in levels (ours less theirs)\n")
    number = 0
    while f"jpeg_{number}" in held:
        _compare_pixels(held, number)
        number += 1


def _compare_boxes(boxes: np.ndarray, *, height: int, width: int) -> None:
    from scipy import stats

    own = _ours(height, width)
    share, shares_ours = (it[:, 2] * it[:, 3] / (height * width) for it in (boxes, own))
    whole = [(it[:, 2:] == (height, width)).all(1).mean() for it in (boxes, own)]
    numbers = [(share, shares_ours), *((it(boxes), it(own)) for it in (_shape, lambda boxes: boxes[:, 2]))]
    p = [_ks(a, b) for a, b in numbers]
    edges = np.unique(np.quantile(boxes[:, 2], np.linspace(0, 1, 11)))
    edges[-1] += 1
    counts = np.stack([np.histogram(it[:, 2], edges)[0] for it in (boxes, own)])
    chi_square: Any = stats.chi2_contingency(counts[:, counts.sum(0) > 0])
    p.append(float(chi_square.pvalue))
    for axis, side in ((0, height), (1, width)):
        places = [_places(it, axis=axis, side=side) for it in (boxes, own)]
        p.append(_ks(*places) if min(map(len, places)) > 100 else 1.0)
    print(
        f"{f'{height} x {width}':16}{share.mean():8.4f}{shares_ours.mean():8.4f}{whole[0]:8.4f}{whole[1]:8.4f}    ",
        end="",
    )
    print("".join(f"{value:8.3f}" for value in p))


def _ks(a: np.ndarray, b: np.ndarray) -> float:
    from scipy import stats

    result: Any = stats.ks_2samp(a, b, method="asymp")
    return float(result.pvalue)


def _shape(boxes: np.ndarray) -> np.ndarray:
    return boxes[:, 3] / boxes[:, 2]


def _places(boxes: np.ndarray, *, axis: int, side: int) -> np.ndarray:
    """Where a box begins, in 0 to 1 of the places that its size leaves; of those that leave some."""
    left = side - boxes[:, 2 + axis]
    return boxes[left > 0, axis] / left[left > 0]


def _ours(height: int, width: int) -> np.ndarray:
    from data_shards.images.crops import DRAWS_PER_SAMPLE, google_crop
    from data_shards.order.randomness import uniforms

    boxes = []
    for draws in uniforms(7, np.arange(_BOXES), draws=DRAWS_PER_SAMPLE):
        box = google_crop(height, width, area=_AREA, ratio=_RATIO, draws=draws)
        boxes.append((box.top, box.left, box.height, box.width))
    return np.array(boxes)


def _compare_pixels(held: Any, number: int) -> None:
    from data_shards.images.decode import read_image
    from data_shards.images.resizing import resize

    own = read_image(held[f"jpeg_{number}"].tobytes()).pixels()
    name = f"{own.shape[0]} x {own.shape[1]}"
    _line(f"{name} decoded, their usual transform", held[f"decoded_{number}"], own)
    precise = held[f"precise_{number}"]
    _line(f"{name} decoded, INTEGER_ACCURATE", precise, own)
    for side in _SIDES:
        floats = held[f"bilinear_{number}_{side}"]
        plain = resize(precise, height=side, width=side, antialias="none")
        _line(f"{name} to {side}, none, their floats", floats, plain)
        _line(f"{name} to {side}, none, rounded", np.round(floats), plain)
        cast = resize(precise, height=side, width=side, antialias="cast")
        _line(f"{name} to {side}, none, cut off", np.floor(floats), plain)
        _line(f"{name} to {side}, cast", np.floor(floats), cast)
        _line(f"{name} to {side}, antialiased", floats, resize(precise, height=side, width=side))
    for way in ("down", "up"):
        floats = held[f"area_{way}_{number}"]
        tall, wide = floats.shape[:2]
        began = time.perf_counter()
        averaged = resize(precise, height=tall, width=wide, interpolation="area")
        milliseconds = (time.perf_counter() - began) * 1e3
        _line(f"{name} to {tall} x {wide}, area ({milliseconds:.0f} ms)", np.floor(floats), averaged)
        _line(f"{name} to {tall} x {wide}, antialiased", np.floor(floats), resize(precise, height=tall, width=wide))


def _line(name: str, expected: np.ndarray, pixels: Pixels) -> None:
    difference = pixels.astype(np.float64) - expected
    error = float((difference**2).mean())
    decibels = 10 * np.log10(255**2 / error) if error else np.inf
    print(
        f"{name:52}{decibels:7.1f} dB{difference.mean():8.3f}{np.abs(difference).max():6.0f}"
        f"{100 * (difference != 0).mean():9.4f} % differ"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=("theirs", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("photographs", type=Path, nargs="*")
    given = parser.parse_args()
    if given.half == "theirs":
        theirs(given.file, given.photographs)
    else:
        compare(given.file)
