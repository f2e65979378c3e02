"""`shardvit pack --dry-run`: text, JSON and mistakes; nothing is written."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.launch.conftest import Call


@pytest.fixture
def images(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "images" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "images"


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(images: Path, call: Call):
    code, output, _ = call("pack", str(images), str(images.parent / "set"), "--dry-run", "--price", "core_hour=1000")
    assert code == 0 and "12 images of 2 classes" in output and "core_hour" in output
    code, output, _ = call("pack", str(images), str(images.parent / "set"), "--dry-run", "--json")
    found = json.loads(output)
    assert json.loads(call("pack", str(images), "set", "--dry-run", "--json", "--workers", "7")[1])["workers"] == 7
    assert code == 0 and found["images"] == 12 and found["requests"] == {"list": 0, "get": 0, "put": 0}
    assert [path.name for path in images.parent.iterdir()] == ["images"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["set", "--price", "get=1"], "--dry-run"),
        (["set", "--dry-run", "--price", "gold=1"], "--price"),
        (["set", "--dry-run", "--bandwidth", "fast"], "--bandwidth"),
        (["--dry-run"], "OUT"),
        (["set", "--dry-run", "--workers", "0"], "--workers"),
        (["set", "--dry-run", "--address", "here:1"], "--address"),
    ],
)
def test_mistakes(images: Path, call: Call, flags: list[str], word: str):
    code, output, error = call("pack", str(images), *flags)
    assert code == 2 and not output and word in error and error.count("\n") == 1
