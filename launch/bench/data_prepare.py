"""Prepare the data benchmark: the user's photographs, repeated, in every layout that a method needs.

    WORK/images/CLASS/N.jpg     class folders, for torchvision and timm
    WORK/shards/train/          the same bytes packed into 8 shards
    WORK/shards-320/train/      packed with --resize-short 320 --quality 90
    WORK/many/                  1,000 shards, hard links to the 8
    WORK/mosaic/, WORK/litdata/ the peers' own formats

Leaves out and counts photographs that stock torchvision code treats differently (CMYK, other formats).
"""

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.image import Resize
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.sets.keeping import write_manifest
from shardvit.data_shards.shards.manifest import read_manifest
from shardvit.data_shards.store.folders import LocalFolder
from shardvit.launch.bench.data_methods import QUALITY, SHORT_SIDE, Work

CLASSES = 10  # in turns; labels are arbitrary here
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
    """Read all plain JPEGs in a folder or a tar; UserError if there are none."""
    contents, pixels, left_out = [], 0, 0
    for content in _files(source):
        if own := _pixels_of_plain_jpeg(content):
            contents.append(content)
            pixels += own
        else:
            left_out += 1
    if not contents:
        raise UserError(f"{source}: there is no JPEG in it; name a folder or a plain tar of photographs")
    count = len(contents)
    mean_bytes = sum(map(len, contents)) // count
    return Photographs(contents, left_out, mean_bytes, mean_megapixels=pixels / count / 1e6)


def _pixels_of_plain_jpeg(content: bytes) -> int:
    from PIL import Image

    if not content.startswith(_JPEG_MAGIC):
        return 0
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
    except (OSError, Image.DecompressionBombError):
        return 0
    return image.width * image.height if image.mode in ("RGB", "L") else 0


def prepare(photographs: Photographs, work: Work, *, images: int) -> None:
    """Write the photographs, repeated to `images`, in our own layouts."""
    lay_out(photographs.contents, work.images, images=images)
    for out, resize in ((work.shards, None), (work.resized, Resize(SHORT_SIDE, quality=QUALITY))):
        each = -(-images // SHARDS)
        pack(str(work.images), out.parent, samples_per_shard=each, resize=resize, report=lambda _: None)
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


def lay_out(contents: list[bytes], folder: Path, *, images: int) -> None:
    """Write the photographs in class folders, repeated to `images` by hard links."""
    for label in range(CLASSES):
        (folder / f"class{label}").mkdir(parents=True)
    files: list[Path] = []
    for number in range(images):
        path = folder / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        if number < len(contents):
            path.write_bytes(contents[number])
        else:
            os.link(files[number % len(contents)], path)
        files.append(path)


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
    write_manifest(LocalFolder(work.many), replace(manifest, shards=tuple(shards)))
