"""Prepare the data benchmark: the user's photographs, repeated, in every layout that a method needs.

    WORK/images/CLASS/N.jpg     class folders, for torchvision and timm
    WORK/shards/train/          the same bytes packed into 8 shards
    WORK/shards-320/train/      packed with --resize-short 320 --quality 90
    WORK/many/                  a set of 1,000 shards that are hard links to the 8: as much to open, nothing to copy
    WORK/mosaic/, WORK/litdata/ in the peers' own formats

Everything lies in the page cache afterwards: what is measured is what loaders cost, not the disk. Photographs that
stock torchvision code fails on or treats otherwise (CMYK, other formats) are left out and counted.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from data_shards.errors import UserError
from data_shards.packing.image import Resize
from data_shards.packing.pack import pack
from data_shards.shards.manifest import read_manifest, write_manifest
from launch.bench.data_methods import QUALITY, SHORT_SIDE, Work

CLASSES = 10  # dealt out in turns; labels mean nothing here
SHARDS = 8
MANY_SHARDS = 1000

_JPEG_MAGIC = b"\xff\xd8\xff"


@dataclass(frozen=True)
class Photographs:
    """The user's photographs."""

    contents: list[bytes]
    left_out: int
    mean_bytes: int
    mean_megapixels: float


def read_photographs(source: Path) -> Photographs:
    """All plain JPEGs of a folder or a tar.

    Raises:
        UserError: there is no such place, or no JPEG in it.
    """
    from PIL import Image

    contents, left_out, pixels = [], 0, 0
    for content in _files(source):
        if not content.startswith(_JPEG_MAGIC):
            left_out += 1
            continue
        try:
            with Image.open(io.BytesIO(content)) as image:
                image.load()
        except (OSError, Image.DecompressionBombError):
            left_out += 1
            continue
        if image.mode not in ("RGB", "L"):
            left_out += 1
            continue
        contents.append(content)
        pixels += image.width * image.height
    if not contents:
        raise UserError(f"{source}: there is no JPEG in it; name a folder or a plain tar of photographs")
    count = len(contents)
    mean_bytes = sum(map(len, contents)) // count
    return Photographs(contents, left_out, mean_bytes, mean_megapixels=pixels / count / 1e6)


def prepare(photographs: Photographs, work: Work, *, images: int) -> None:
    """Lay the photographs out, repeated to `images`, in our own layouts; the peers' formats are made by the peers."""
    _lay_out(photographs.contents, work.images, images=images)
    _pack(work.images, work.shards.parent, images=images)
    _pack(work.images, work.resized.parent, images=images, resize=Resize(SHORT_SIDE, quality=QUALITY))
    _link_many(work)


def _files(source: Path) -> Iterator[bytes]:
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file():
                yield path.read_bytes()
        return
    try:
        with tarfile.open(source) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isreg() else None
                if stream is not None:
                    yield stream.read()
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{source}: neither a folder nor a readable tar ({error}); name one of photographs") from None


def _lay_out(contents: list[bytes], folder: Path, *, images: int) -> None:
    for label in range(CLASSES):
        (folder / f"class{label}").mkdir(parents=True)
    first: dict[int, Path] = {}
    for number in range(images):
        path = folder / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        which = number % len(contents)
        if which in first:
            os.link(first[which], path)
        else:
            path.write_bytes(contents[which])
            first[which] = path


def _pack(source: Path, out: Path, *, images: int, resize: Resize | None = None) -> None:
    pack(str(source), out, samples_per_shard=-(-images // SHARDS), resize=resize, report=lambda _: None)


def _link_many(work: Work) -> None:
    manifest = read_manifest(work.shards)
    work.many.mkdir()
    shards = []
    for number in range(MANY_SHARDS):
        shard = manifest.shards[number % len(manifest.shards)]
        link = replace(shard, file=f"many-{number:06d}.tar")
        for suffix in (".tar", ".idx"):
            os.link((work.shards / shard.file).with_suffix(suffix), (work.many / link.file).with_suffix(suffix))
        shards.append(link)
    write_manifest(replace(manifest, root=work.many, shards=tuple(shards)))
