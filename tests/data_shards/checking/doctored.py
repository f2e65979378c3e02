"""A small sound set, ways to damage it, and ways to ask the doctor."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardvit.data_shards.checking.check import CheckOptions, CheckResult, check
from shardvit.data_shards.checking.findings import Finding
from shardvit.data_shards.engines.engine import local_engine
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.shards.tar_index import index_path, open_index
from tests.data_shards.external_tars import write_tar

CLASSES = ("ant", "bee", "cow")


def encoded(seed: int, *, side: int = 24, image_format: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 8, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, image_format)
    return stream.getvalue()


def tars(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def looked_at(location: Path | str, **options: Any) -> CheckResult:
    spec = options.pop("spec", None) or ShardsSpec(str(location))
    chosen = CheckOptions(**{name: options.pop(name) for name in vars(CheckOptions()) if name in options})
    return check(spec, options=chosen, **{"engine": local_engine(1), "report": lambda line: None, **options})


def by_kind(result: CheckResult) -> dict[str, Finding]:
    kinds = [finding.kind for finding in result.findings]
    assert len(kinds) == len(set(kinds)), kinds
    return {finding.kind: finding for finding in result.findings}


def only(result: CheckResult, kind: str) -> Finding:
    found = by_kind(result)
    assert list(found) == [kind], found
    return found[kind]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def flip(path: Path, offset: int) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0x55]))


def image_place(tar: Path, row: int) -> tuple[str, int, int]:
    index = open_index(tar)
    return index.keys[row], int(index.image_offset[row]), int(index.image_size[row])


def members(tar: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(tar) as stream:
        return [(member.name, stream.extractfile(member).read()) for member in stream]


def exchange(tar: Path, content: list[tuple[str, bytes]]) -> None:
    """Another content that the manifest vouches for, and no index beside it."""
    write_tar(tar, content)
    index_path(tar).unlink(missing_ok=True)
    path = tar.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    (entry,) = (entry for entry in manifest["shards"] if entry["file"] == tar.name)
    entry |= {"num_bytes": tar.stat().st_size, "sha256": hashlib.sha256(tar.read_bytes()).hexdigest()}
    path.write_text(json.dumps(manifest))


def put(
    tar: Path, *, images: Mapping[int, bytes | None] | None = None, labels: Mapping[int, bytes] | None = None
) -> list[str]:
    """Exchange (None: remove) images and labels of samples; returns all keys."""
    keys = list(open_index(tar).keys)
    new = {(keys[row], False): ("png", data) for row, data in (images or {}).items()}
    new |= {(keys[row], True): ("cls", data) for row, data in (labels or {}).items()}
    content = []
    for name, data in members(tar):
        key, _, extension = name.partition(".")
        extension, data = new.get((key, extension == "cls"), (extension, data))
        content += [] if data is None else [(f"{key}.{extension}", data)]
    exchange(tar, content)
    return keys
