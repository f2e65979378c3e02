"""Folders to pack, and the packed samples as read back."""

import hashlib
import io
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from shardvit.data_shards.packing.found import PackReport
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.shards.tar_index import open_index

Sample = tuple[str, bytes, int]


def encoded(seed: int, format: str = "PNG", mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, format=format)
    return buffer.getvalue()


def write_folder(root: Path, counts: dict[str, int]) -> dict[bytes, str]:
    """Class folders of different images; returns image -> class."""
    owner: dict[bytes, str] = {}
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            data = encoded(len(owner) + zlib.crc32(root.name.encode()) % 1000 * 1000, "JPEG" if i % 2 else "PNG")
            (root / name / f"im. {i}{'.jpeg' if i % 2 else '.png'}").write_bytes(data)
            owner[data] = name
    assert len(owner) == sum(counts.values())
    return owner


def by_index(manifest: Manifest) -> list[Sample]:
    found = []
    for path in manifest.shard_paths:
        index = open_index(path)
        data = path.read_bytes()
        for i, key in enumerate(index.keys):
            image = data[index.image_offset[i] : index.image_offset[i] + index.image_size[i]]
            label = data[index.label_offset[i] : index.label_offset[i] + index.label_size[i]]
            found.append((key, image, int(label)))
    return found


def by_webdataset(manifest: Manifest) -> list[Sample]:
    import webdataset

    data = webdataset.WebDataset([str(path) for path in manifest.shard_paths], shardshuffle=False, empty_check=False)
    found = []
    for sample in data:
        parts = set(sample) - {"__key__", "__url__", "__local_path__", "cls"}
        assert len(parts) == 1
        found.append((sample["__key__"], sample[parts.pop()], int(sample["cls"])))
    return found


def tree(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def packed_images(manifest: Manifest) -> list[bytes]:
    return [image for _, image, _ in by_index(manifest)]


def spoken(*args, **kwargs) -> tuple[PackReport, str]:
    """Pack under a fixed name, so that results in different folders can be compared; returns the printed text too."""
    lines: list[str] = []
    result = pack(*args, report=lines.append, **{"name": "in", **kwargs})
    return result, "\n".join(lines)


def quiet(*args, **kwargs) -> PackReport:
    return spoken(*args, **kwargs)[0]
