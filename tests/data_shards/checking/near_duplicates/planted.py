"""Photographs, edited copies of them, and collections of both in memory."""

import hashlib
import io
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from shardvit.data_shards.checking.near_duplicates.fingerprint import ImagePlace
from shardvit.data_shards.checking.near_duplicates.matches import Matches, find_matches
from shardvit.data_shards.engines.engine import local_engine
from shardvit.data_shards.errors import UnreadableImage

_PART = 96  # pixels of a side

EDITS = ("quality 50", "x 0.7", "x 1.4", "mirrored", "cropped")
MORE_EDITS = ("grey", "square", "border", "cropped 80 %", "cropped 70 %", "mirrored, cropped 75 %")


@cache
def _whole() -> list[np.ndarray]:
    from sklearn.datasets import load_sample_images  # a second, which helper processes do without

    return load_sample_images().images


def photographs(number: int, *, side: int = 64, seed: int = 0) -> list[Image.Image]:
    """Different parts of scikit-learn's two photographs, a third of their side apart, reduced to `side` pixels."""
    draw = np.random.default_rng(seed)
    found: list[Image.Image] = []
    taken: list[tuple[int, int, int]] = []
    for _ in range(20_000):
        which = int(draw.integers(2))
        pixels = _whole()[which]
        top, left = (int(draw.integers(0, length - _PART)) for length in pixels.shape[:2])
        is_new = all(w != which or max(abs(t - top), abs(c - left)) > _PART // 3 for w, t, c in taken)
        part = pixels[top : top + _PART, left : left + _PART]
        if is_new and part.mean(axis=2).std() > 15:
            taken.append((which, top, left))
            found.append(Image.fromarray(part).resize((side, side), Image.Resampling.LANCZOS))
        if len(found) == number:
            return found
    raise AssertionError("the photographs are too small for so many parts")


def edited(image: Image.Image, edit: str, *, seed: int = 0) -> Image.Image:
    if ", " in edit:
        for one in edit.split(", "):
            image = edited(image, one, seed=seed)
        return image
    width, height = image.size
    if edit.startswith("x "):
        return image.resize((round(width * float(edit[2:])), round(height * float(edit[2:]))), Image.Resampling.BICUBIC)
    if edit == "mirrored":
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if edit == "grey":
        return image.convert("L").convert("RGB")
    if edit == "square":
        return ImageOps.fit(image, (min(width, height),) * 2)
    if edit == "changed":  # a hundredth of it is darker or brighter
        pixels = np.asarray(image).astype(int)
        piece = pixels[int(0.45 * height) : int(0.55 * height), int(0.45 * width) : int(0.55 * width)]
        piece += 50 if piece.mean() < 128 else -50
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if edit == "border":
        return ImageOps.expand(image, 20 * max(width, height) // 500, (255, 255, 255))
    if edit.startswith("cropped"):
        draw = np.random.default_rng(seed)
        share = int(edit.split()[1]) / 100 if " " in edit else 0.95
        new_width, new_height = round(width * share), round(height * share)
        left, top = draw.integers(0, width - new_width + 1), draw.integers(0, height - new_height + 1)
        return image.crop((left, top, left + new_width, top + new_height))
    return image


def jpeg(image: Image.Image, *, quality: int = 92) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


class InMemory:
    """A collection; None stands for an image that cannot be read."""

    def __init__(
        self,
        images: Iterable[bytes | None],
        *,
        name: str = "images",
        part_size: int = 50,
        read_by: Literal["processes", "threads"] = "threads",
    ) -> None:
        self.images = list(images)
        self.name, self.read_by = name, read_by
        self._part_size = part_size
        self.sizes = [min(part_size, len(self.images) - at) for at in range(0, len(self.images), part_size)]
        self.digest = hashlib.sha256(repr(self.images).encode()).hexdigest()
        self.reads = 0

    def part_digest(self, part: int) -> str:
        return hashlib.sha256(f"{self.digest} {part} {self._part_size}".encode()).hexdigest()

    def read(self, part: int, row: int) -> bytes:
        self.reads += 1
        data = self.images[part * self._part_size + row]
        if data is None:
            raise UnreadableImage("gone")
        return data

    def place(self, part: int, row: int) -> ImagePlace:
        return ImagePlace(f"part-{part}", str(part * self._part_size + row))


def matches(images: InMemory, *others: InMemory, folder: Path, processes: int = 1) -> Matches:
    return find_matches(images, others, folder=folder, engine=local_engine(processes), report=lambda line: None)


def pairs(found: Matches) -> dict[int, tuple[int, str]]:
    return {match.image: (match.other, match.kind) for match in found.matches}
