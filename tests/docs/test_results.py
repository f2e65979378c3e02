"""The trained results in docs/results: their weights are the ones that are described, and predict."""

import csv
import hashlib
import re
from pathlib import Path

import pytest
from PIL import Image

from shardvit.pipeline.using.predict import open_predictor, predict_images
from tests.conftest import ROOT

RESULTS = ROOT / "docs" / "results"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(scope="module", params=["cifar10", "cifar10_long"])
def result(request: pytest.FixtureRequest) -> Path:
    """What one run left."""
    return RESULTS / request.param


@pytest.fixture(scope="module")
def sums(result: Path) -> dict[str, str]:
    """File -> its SHA-256."""
    lines = (result / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {name: sum_ for sum_, _, name in (line.partition("  ") for line in lines)}


def test_the_weights_are_those_of_the_page(result: Path, sums: dict[str, str]):
    for name in ("model/config.json", "model/model.safetensors"):
        content = (result / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sums[name]
        assert len(content) < 20e6


def test_every_shard_has_its_sum(sums: dict[str, str]):
    shards = [name for name in sums if name.startswith("shards/")]
    assert len(shards) == 60 and all(name.endswith(".tar") for name in shards)


def test_the_weights_load_and_predict(result: Path):
    predictor = open_predictor(result / "model", device="cpu")
    sky = Image.new("RGB", (60, 40), (120, 170, 230))
    (found,) = predict_images(predictor, [sky], top=10, batch_images=1)
    assert sorted(each.name for each in found.classes) == CLASSES
    assert sum(each.probability for each in found.classes) == pytest.approx(1, abs=1e-5)
    assert found.best.name in ("airplane", "bird", "ship")


def test_the_page_says_what_the_run_measured(result: Path):
    page = (RESULTS / "cifar10.md").read_text(encoding="utf-8")
    for stage in ("pretrain", "finetune"):
        with (result / f"{stage}.csv").open(encoding="utf-8") as file:
            top1 = [row["val/top1"] for row in csv.DictReader(file) if row["val/top1"]]
        assert re.search(rf"\b{float(top1[-1]):.4f}\b", page)
