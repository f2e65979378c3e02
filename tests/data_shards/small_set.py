"""Pack a small set, read it by webdataset, and count open files, for the tests of reading."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.shard_reader import RawSample
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.shards.tar_index import index_path, read_index


def pack_small(folder: Path) -> Manifest:
    """30 images, some of them JPEGs, of 3 classes in 6 shards."""
    draw = np.random.default_rng(0)
    for number in range(30):
        of_class = folder / "in" / f"class{number % 3}"
        of_class.mkdir(parents=True, exist_ok=True)
        side = 5 + number % 4
        pixels = draw.integers(0, 256, (side, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(of_class / f"{number}.{'png' if number % 2 else 'jpg'}")
    return pack(str(folder / "in"), folder / "out", samples_per_shard=5, report=lambda line: None).train


def places(manifest: Manifest) -> list[tuple[int, int]]:
    return [(shard, row) for shard, entry in enumerate(manifest.shards) for row in range(entry.num_samples)]


def by_webdataset(manifest: Manifest) -> list[RawSample]:
    """Through webdataset's tar reader and grouping; its WebDataset would leave the tars open."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    found = []
    for path in manifest.shard_paths:
        with open(path, "rb") as stream:
            for sample in group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])):
                (image,) = (sample[part] for part in sample if part in ("jpg", "png"))
                found.append(RawSample(key=sample["__key__"], image=image, labels=(int(sample["cls"]),)))
    return found


def touch_up(tar: Path) -> None:
    """Change one bit of a tar's first image, or change it back; size and time of the file stay."""
    status, content = tar.stat(), bytearray(tar.read_bytes())
    content[int(read_index(index_path(tar)).image_offset[0]) + 40] ^= 1
    tar.write_bytes(content)
    os.utime(tar, ns=(status.st_atime_ns, status.st_mtime_ns))


def open_files(folder: Path) -> int:
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one that listed the folder
            continue
    return sum(path.startswith(str(folder)) for path in paths)


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in Linux's /proc")
