"""The set that the doctor's tests damage."""

import shutil
from pathlib import Path

import pytest

from shardvit.data_shards.packing.pack import pack
from tests.data_shards.checking.doctored import CLASSES, encoded


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ with 36 images in 4 shards of 9, val/ with 12 in 2, of 3 classes; every fourth image a PNG."""
    top = tmp_path_factory.mktemp("sound")
    for number in range(48):
        folder = top / "in" / ("val" if number >= 36 else "train") / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        kind = "PNG" if number % 4 == 0 else "JPEG"
        (folder / f"{number}.{kind.lower()}").write_bytes(encoded(number, image_format=kind))
    pack(str(top / "in"), top / "set", samples_per_shard=9, report=lambda line: None)
    return top / "set"


@pytest.fixture
def shards(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(sound, tmp_path / "set")
