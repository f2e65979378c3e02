"""Semantic duplicates: within clusters as by brute force, once whatever the batches, never a problem of a set."""

import json
from pathlib import Path

import numpy as np
import pytest

from shardvit.data_shards.store.store import Store
from shardvit.launch.commands.data.check import check
from shardvit.launch.evaluation.semantic_check import SemanticOptions
from shardvit.pipeline.transfer import features as features_module
from shardvit.pipeline.transfer import semantic
from shardvit.pipeline.transfer.semantic import semantic_matches
from tests.pipeline.transfer.small_model import damage, digits, open_small, pack_digits, save_small, store_for


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("semantic")
    pack_digits(root / "shards")
    save_small(root / "model")
    return root


def brute_force(values: np.ndarray, similar: float) -> dict[int, tuple[int, float]]:
    """Each image's most alike earlier one."""
    units = values / np.linalg.norm(values, axis=1, keepdims=True)
    cosines = np.tril(units @ units.T, -1) - 2 * np.triu(np.ones((len(units), len(units))))
    return {n: (int(row.argmax()), float(row.max())) for n, row in enumerate(cosines) if row.max() >= similar}


@pytest.mark.parametrize("clusters", [1, 8])
def test_pairs_are_those_of_brute_force(
    work: Path, tmp_path: Path, clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_module, "_PART_SAMPLES", 100)
    monkeypatch.setattr(semantic, "_ROWS_AT_ONCE", 7)
    monkeypatch.setattr(semantic, "_FILES", 3)
    shards = digits(work / "shards", "train")
    monkeypatch.setattr(semantic, "_CLUSTER_IMAGES", shards.num_samples // clusters)
    features = store_for(open_small(work / "model"), tmp_path)
    similar = 0.98
    found = semantic_matches(features, shards, similar=similar, store=Store())
    expected = brute_force(features.features(shards).values.numpy(), similar)
    assert len(expected) > 50 and features.forward_passes == sum(
        -(-min(100, shards.num_samples - at) // 16) for at in range(0, shards.num_samples, 100)
    )
    got = {match.image: (match.other, match.likeness) for match in found.matches}
    assert {match.kind for match in found.matches} == {"semantic"}
    assert [match.likeness for match in found.matches] == sorted((m.likeness for m in found.matches), reverse=True)
    if clusters == 1:
        assert got.keys() == expected.keys()
    assert got.keys() <= expected.keys() and len(got) >= 0.9 * len(expected)  # the rest is across borders
    for image, (other, cosine) in got.items():
        assert other < image and cosine <= expected[image][1] + 1e-4
        if clusters == 1:
            assert cosine == pytest.approx(expected[image][1], abs=1e-4)
    again = store_for(open_small(work / "model"), tmp_path / "again", batch_images=5, workers=2)
    other = semantic_matches(again, shards, similar=similar, store=Store())
    assert [match[:3] for match in sorted(other.matches)] == [match[:3] for match in sorted(found.matches)]


def test_a_damaged_image_is_counted_and_left_out(work: Path, tmp_path: Path) -> None:
    shards = digits(pack_digits(tmp_path / "shards"), "val")
    damage(shards, 5)
    features = store_for(open_small(work / "model"), tmp_path / "kept")
    found = semantic_matches(features, shards, similar=-0.9, store=Store())
    assert list(found.undecoded.values()) == [1]
    assert {match.image for match in found.matches} == set(range(1, shards.num_samples)) - {5}


def test_check_lists_them_and_they_are_no_problem(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = SemanticOptions(features=work / "model", similar=0.99)
    code = check(str(work / "shards"), semantic=options, report=str(tmp_path / "out"), as_json_text=True)
    result = json.loads(capsys.readouterr().out)
    (finding, *_) = [each for each in result["findings"] if each["kind"] == "semantic" and each["split"] == "train"]
    assert code == 0 and finding["severity"] == "info"
    lines = [json.loads(line) for line in (tmp_path / "out" / "semantic.jsonl").read_text().splitlines()]
    assert sum(each["count"] for each in result["findings"] if each["kind"] == "semantic") == len(lines)
    assert {line["kind"] for line in lines} == {"semantic"} and min(line["likeness"] for line in lines) >= 0.99
    assert "Semantic" in (tmp_path / "out" / "matches.html").read_text()
    assert not (tmp_path / "out" / "matches.jsonl").exists()
