"""An evaluation by 1, 2, 3 and 4 real processes: the same to the last bit, and what scikit-learn says of the logits."""

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics as oracle

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.loader import eval_batches
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.packing.sources.label_list import LabelList
from shardvit.data_shards.reading.opening import open_shards
from shardvit.pipeline.evaluation.evaluate import Evaluated, keep_evaluations
from shardvit.pipeline.evaluation.own_metrics import OwnMetrics
from shardvit.pipeline.recipe.stage_plan import chosen_metrics
from shardvit.pipeline.runs.evaluations import evaluations, load_evaluation
from shardvit.pipeline.stage.pixels import model_input
from tests.pipeline.runs.test_evaluations import same
from tests.workers import run_ranks

WORKER = Path(__file__).with_name("evaluation_worker.py")
IMAGES = 90  # 23 batches of 4: no number of processes divides them

_spec = importlib.util.spec_from_file_location("evaluation_worker", WORKER)
worker: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


class Alone:
    """A single rank without a process group."""

    place = SimpleNamespace(rank=0, world_size=1)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[None].double()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


CLASSES = [f"class-{number}" for number in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of one label an image, and one of several: some have none, and one class has no image. In each an image is
    damaged."""
    top = tmp_path_factory.mktemp("evaluation")
    for kind in ("single", "multi"):
        pack_labelled(top / kind, kind=kind)
    return top


def pack_labelled(folder: Path, *, kind: str) -> None:
    draw = np.random.default_rng(5)
    rows = ["path,label"]
    (folder / "in").mkdir(parents=True)
    for number in range(IMAGES):
        pixels = draw.integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "in" / f"{number:03d}.png")
        chosen = np.flatnonzero(draw.random(7) < 0.3) if kind == "multi" else [draw.integers(0, 8)]
        rows.append(f"{number:03d}.png,{'|'.join(CLASSES[each] for each in chosen)}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    pack(
        str(folder / "in"),
        folder / "shards",
        labels=LabelList(folder / "labels.csv", class_names=folder / "classes.txt"),
        holdout=0.99,
        samples_per_shard=20,
        report=lambda line: None,
    )
    shard = sorted((folder / "shards/val").glob("*.tar"))[1]
    content = bytearray(shard.read_bytes())
    at = content.index(b"\x89PNG")
    content[at : at + 64] = bytes(64)
    shard.write_bytes(content)


@pytest.fixture(scope="module", params=["single", "multi"])
def packed(request: pytest.FixtureRequest, folder: Path) -> Path:
    return folder / request.param


@pytest.fixture(scope="module")
def alone(packed: Path) -> Evaluated:
    return worker.evaluated(packed, ranks=Alone(), kind=packed.name)


@pytest.fixture(scope="module")
def truth(packed: Path) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Keys, labels (multi-hot) and logits of the readable samples, by the model alone."""
    shards = open_shards(str(packed / "shards/val"))
    rows: dict[str, Any] = {"keys": [], "labels": [], "logits": []}

    def note(batch: Any, logits: torch.Tensor) -> None:
        for row in batch.counted.numpy().nonzero()[0].tolist():
            table = torch.zeros(8)
            for label in batch.labels[row].flatten().tolist():
                if label >= 0:
                    table[label] = 1
            rows["keys"].append(batch.keys[row])
            rows["labels"].append(table)
            rows["logits"].append(logits[row])

    model = worker.small_model(shards.num_classes)
    part = worker.batches_of(shards, rank=0, world_size=1)
    for batch in eval_batches(part, workers=0):
        with torch.inference_mode():
            note(batch, model(model_input(batch, device=torch.device("cpu"), dtype=torch.float32)))
    return rows["keys"], torch.stack(rows["labels"]), torch.stack(rows["logits"])


@pytest.mark.parametrize("world_size", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 4))])
def test_any_number_of_processes_finds_the_same_to_the_last_bit(folder: Path, world_size: int):
    out = folder / f"of-{world_size}"
    out.mkdir()
    run_ranks(WORKER, out, world_size=world_size)
    for kind in ("single", "multi"):
        alone = worker.evaluated(folder / kind, ranks=Alone(), kind=kind)
        for rank in range(world_size):
            found = torch.load(out / f"rank-{rank}.pt", weights_only=False)[kind]
            assert found.metrics == alone.metrics and all(map(math.isfinite, alone.metrics.values()))
            assert same(found.record, alone.record)


def test_own_metrics_count_every_readable_image_once_in_set_order(alone: Evaluated, truth: Any):
    """On several processes they are compared above."""
    _, _, logits = truth
    assert alone.metrics["val/best_is_true"] == alone.metrics["val/top1"]
    wanted = float((logits[:, 0].double() * torch.arange(len(logits))).sum() / len(logits))
    assert alone.metrics["val/Scores"] == wanted


def test_an_own_metric_must_give_a_value_per_image(packed: Path):
    """And says which one does not."""
    measure = OwnMetrics({"mean": lambda logits, targets: (logits.argmax(1) == targets).float().mean()})
    batch: Any = SimpleNamespace(counted=torch.ones(3, dtype=torch.bool))
    with pytest.raises(UserError, match=r"metric mean: it gives \[\], not a tensor of a value per image, \[3\]"):
        measure.update(batch, torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))


def test_every_readable_image_counts_once_and_the_numbers_are_scikit_learns(alone: Evaluated, truth: Any):
    _, labels, logits = truth
    metrics, record = alone.metrics, alone.record
    images = len(labels)
    assert record is not None and metrics["val/images"] == record.images == images
    assert 80 < images < IMAGES  # one is damaged
    best = logits.argmax(dim=1)
    hit = labels.gather(1, best[:, None])[:, 0] > 0
    assert metrics["val/top1"] == hit.double().mean().item()
    assert record.per_class.images.tolist() == labels.sum(0).tolist()
    assert record.per_class.right.tolist() == labels[hit].sum(0).tolist()
    assert record.per_class.answers is not None
    assert record.per_class.answers.tolist() == best.bincount(minlength=8).tolist()
    assert metrics["val/commonest_class_share"] == labels.mean(0).max()
    if record.label_kind == "multi":
        assert metrics["val/precision_at_1"] == metrics["val/top1"] and record.confusion is None
        assert "val/balanced_accuracy" not in metrics
        expected = [
            oracle.average_precision_score(labels[:, each], logits[:, each])
            for each in range(8)
            if labels[:, each].any()
        ]
        assert len(expected) == 7 and metrics["val/mean_average_precision"] == pytest.approx(
            np.mean(expected), abs=2e-6
        )
    else:
        wanted = labels.argmax(dim=1)
        assert np.array_equal(record.confusion, oracle.confusion_matrix(wanted, best, labels=range(8)))
        assert metrics["val/balanced_accuracy"] == pytest.approx(oracle.balanced_accuracy_score(wanted, best))
        assert metrics["val/top5"] == oracle.top_k_accuracy_score(wanted, logits, k=5, labels=range(8))
        loss = torch.nn.functional.cross_entropy(logits.double(), wanted)
        assert metrics["val/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["val/calibration_error"] > 0 and record.calibration is not None


def test_what_is_kept_of_samples_is_what_the_model_says_of_them(alone: Evaluated, truth: Any):
    keys, labels, logits = truth
    record = alone.record
    assert record is not None
    shares = logits.softmax(1) if record.label_kind == "single" else logits.sigmoid()
    rows = {key: row for row, key in enumerate(keys)}
    wrong = labels.gather(1, logits.argmax(1)[:, None])[:, 0] == 0
    confidence = shares.max(1).values[wrong].sort(descending=True).values[:64]
    assert [each.probability for each in record.mistakes] == pytest.approx(confidence.tolist(), rel=1e-5)
    assert [each.sample for each in record.examples] == [
        at for at in range(64) if at in {e.sample for e in record.examples}
    ]
    assert len(record.examples) in (63, 64) and {each.key for each in record.examples} <= rows.keys()
    for each in (*record.mistakes, *record.examples):
        row = rows[each.key]
        assert sorted(each.true) == labels[row].nonzero().flatten().tolist()
        assert [number for number, _ in each.top] == logits[row].topk(5).indices.tolist()
        assert each.top[0] == (each.predicted, each.probability)
        if each.true:
            assert each.probability_of_true == pytest.approx(shares[row, list(each.true)].max().item(), rel=1e-4)
        else:
            assert math.isnan(each.probability_of_true)
    assert all(each.predicted not in each.true for each in record.mistakes)


def test_a_disk_that_fails_costs_a_line(alone: Evaluated, tmp_path: Path):
    said: list[str] = []
    keep_evaluations(tmp_path / "gone", [alone], step=3, say=said.append)
    assert len(said) == 1 and "step 3" in said[0]
    keep_evaluations(tmp_path, [alone], step=3, say=said.append)
    (folders,) = evaluations(tmp_path).values()
    assert len(said) == 1 and same(load_evaluation(folders[0]), alone.record)


def test_chosen_metrics_follow_the_labels_and_what_why_is_refused():
    def chosen(asked: Any, **changes: Any) -> tuple[str, ...]:
        usual: dict[str, Any] = {"label_kind": "single", "num_classes": 10, "flag": "the.key"}
        return chosen_metrics(asked, **{**usual, **changes})

    assert chosen("auto") == ("top5", "calibration_error") and chosen("auto", num_classes=5) == ("calibration_error",)
    assert chosen("auto", label_kind="multi") == ("precision_at_1",)
    assert chosen(("top5",), num_classes=3) == ("top5",) and chosen(()) == ()
    for asked, kind in (("top5", "multi"), ("calibration_error", "multi"), ("mean_average_precision", "single")):
        with pytest.raises(UserError, match=rf"^the\.key names {asked}"):
            chosen((asked,), label_kind=kind)
    asked = ("mean_average_precision",)
    assert chosen(asked, label_kind="multi", num_classes=21_843) == asked
