"""Make tars as other tools do, by webdataset and by hand, and open them without a manifest."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import RawSample, ShardReader
from shardvit.data_shards.shards.shard_set import ShardSet, ShardsSpec

Samples = list[dict[str, Any]]
IMAGES = ("jpg", "jpeg", "png", "webp")


def by_shard_writer(folder: Path, samples: Samples, *, per_shard: int = 5) -> Path:
    import webdataset

    folder.mkdir(exist_ok=True)
    with webdataset.ShardWriter(str(folder / "x-%06d.tar"), maxcount=per_shard, verbose=0) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def numbered(count: int = 12) -> Samples:
    return [
        {"__key__": f"a b/{i:05d}", IMAGES[i % 4]: b"image %d" % i, "cls": i % 3, "json": {"label": f"name{i % 2}"}}
        for i in range(count)
    ]


def write_tar(path: Path, parts: list[tuple[str, bytes]], *, format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in parts:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def quiet(line: str) -> None:
    pass


def opened(spec: ShardsSpec | str | Path, **options: Any) -> ShardSet:
    return open_shards(str(spec) if isinstance(spec, Path) else spec, **{"report": quiet, **options})


def read_all(shards: ShardSet, **options: Any) -> list[RawSample]:
    reader = ShardReader(shards, **options)
    return [reader.read(i, row=row) for i, shard in enumerate(shards.shards) for row in range(shard.num_samples)]
