"""The same images at different places, and sources of them."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.engines.engine import LocalEngine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import Unpacking
from shardvit.data_shards.packing.sources.base import Source
from shardvit.data_shards.packing.sources.recognise import open_source
from shardvit.data_shards.packing.sources.tars.samples import SampleOptions

CLASSES = ("cat", "dog", "owl")
IMAGES = {f"{name}/{number:03d}.jpg": f"{name} {number}".encode() * 50 for name in CLASSES for number in range(7)}
Put = Callable[[str, bytes], None]
Triple = tuple[str, str, bytes]


def open_at(spec: Path | str, work: Path, *, workers: int = 1, **options: Any) -> Source:
    labels, unfit = options.pop("labels", None), options.pop("unfit", "refuse")
    unpacking = Unpacking(work, lambda line: None, LocalEngine(workers))
    return open_source(str(spec), labels=labels, samples=SampleOptions(**options), unpacking=unpacking, unfit=unfit)


def images_of(source: Source) -> set[Triple]:
    """Split, class and bytes of every image."""
    return {
        (split, source.classes[int(images.labels[row])], images.read(row))
        for split, images in source.splits.items()
        for row in range(len(images))
    }


EXPECTED = {("train", name.partition("/")[0], data) for name, data in IMAGES.items()}


def tar_of(members: dict[str, bytes], *, gz: bool = False) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz" if gz else "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def sample_tars(*, label: str = "cls", gz: bool = False) -> dict[str, bytes]:
    """The images in three tars, not sorted by class; the label in KEY.`label`."""
    parts: list[dict[str, bytes]] = [{}, {}, {}]
    for number, (name, data) in enumerate(IMAGES.items()):
        folder = name.partition("/")[0]
        text = json.dumps({"about": {"class": folder}, "caption": "a b"}) if label == "json" else folder
        parts[number % 3] |= {f"{number:05d}.jpg": data, f"{number:05d}.{label}": text.encode()}
    return {f"{number:03d}.tar{'.gz' if gz else ''}": tar_of(part, gz=gz) for number, part in enumerate(parts)}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def put_all(put: Put, above: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        put(f"{above}/{name}", data)


def refused_at(spec: Path | str, work: Path, message: str, **options: Any) -> str:
    with pytest.raises(UserError, match=message) as caught:
        open_at(spec, work, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
