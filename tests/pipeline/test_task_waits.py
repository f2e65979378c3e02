"""Between two logged steps nothing makes the host wait for a GPU: here the device `meta`, which has no values to read.

Whatever would need them on the host raises, and the counter sees blocking copies and tensors made of Python's numbers.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.mixing import Mix
from shardvit.data_shards.vocabulary import GOOGLES, LabelKind
from shardvit.launch.bench.operations import Operations, count
from shardvit.model.loss import loss_function
from shardvit.model.vocabulary import COLOURS, LossKind
from shardvit.pipeline.evaluation.evaluate import run_model
from shardvit.pipeline.evaluation.own_metrics import OwnMetrics
from shardvit.pipeline.stage.pixels import to_device
from shardvit.pipeline.stage.task import Classification, Task
from shardvit.pipeline.tasks.patch_corruption import MaskedPatches

META = torch.device("meta")
COUNT, SIZE, PATCH = 6, 12, 3
CLASSES = tuple("abcde")
OUTPUTS = {"classes": (COUNT, len(CLASSES)), "patches": (COUNT, (SIZE // PATCH) ** 2 // 2, len(COLOURS))}


def batch(*, labels: LabelKind = "single", mix: Mix | None = None, counted: int = COUNT) -> Batch:
    """As it comes from the loader on a GPU: what is needed there is there."""
    rows = COUNT + (mix is not None)
    return Batch(
        images=torch.zeros(rows, SIZE, SIZE, 3, dtype=torch.uint8, device=META),
        mirrored=torch.zeros(rows, dtype=torch.bool, device=META),
        labels=torch.zeros((rows,) if labels == "single" else (rows, 3), dtype=torch.int64, device=META),
        counted=torch.arange(rows) < counted,
        substituted=torch.zeros(rows, dtype=torch.bool),
        samples=torch.arange(rows),
        epochs=torch.zeros(rows, dtype=torch.int64),
        keys=("",) * rows,
        mix=mix,
    )


def engine(shape: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        device=META,
        input_dtype=torch.bfloat16,
        module=SimpleNamespace(eval=lambda: None, train=lambda: None),
        predict=lambda *inputs: torch.empty(shape, device=META),
    )


def classification(*, kind: LossKind, labels: LabelKind) -> Classification:
    return Classification(
        engine=engine(OUTPUTS["classes"]),
        classes=CLASSES,
        label_kind=labels,
        normalisation=GOOGLES,
        train_loss=loss_function(kind, label_smoothing=0.1),
        loss_kind=kind,
    )


def masked_patches() -> MaskedPatches:
    return MaskedPatches(engine=engine(OUTPUTS["patches"]), seed=3, patch_size=PATCH)


def waits_of_a_step(task: Task, given: Batch, *, outputs: tuple[int, ...]) -> dict[str, int]:
    count(lambda: task.example(given, use="train"))  # the first makes the constants
    logits = torch.empty(outputs, device=META, requires_grad=True)
    with Operations() as counted:
        example = task.example(given, use="train")
        task.loss(logits, example.targets).backward()
    assert counted.total > 3
    return dict(counted.waits)


MIXES = [None, Mix("mixup", keep=0.7), Mix("cutmix", keep=0.9, box=Box(top=1, left=0, height=3, width=2))]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("kind", "labels"), [("softmax", "single"), ("sigmoid", "single"), ("sigmoid", "multi")])
def test_a_step_of_classification_does_not_wait(kind: LossKind, labels: LabelKind, mix: Mix | None):
    task = classification(kind=kind, labels=labels)
    assert waits_of_a_step(task, batch(labels=labels, mix=mix), outputs=OUTPUTS["classes"]) == {}


def test_a_step_of_masked_patches_does_not_wait():
    assert waits_of_a_step(masked_patches(), batch(), outputs=OUTPUTS["patches"]) == {}


@pytest.mark.parametrize("counted", [COUNT, 4, 0])
@pytest.mark.parametrize(
    "task", [masked_patches(), classification(kind="softmax", labels="single")], ids=["patches", "classes"]
)
def test_an_evaluation_waits_for_none_of_its_batches(task: Any, counted: int):
    faults: Any = SimpleNamespace(note=lambda *arguments, **options: None)
    count(lambda: task.example(batch(), use="eval"))
    with Operations() as counter:
        kept = run_model([batch(), batch(counted=counted), batch()], task=task, faults=faults)
    assert [len(each) for each in kept.columns] == [COUNT] * 3 and not counter.waits


class Sums:
    """A metric of the user's own that wants only rows that count."""

    def __init__(self) -> None:
        self.rows = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.rows += len(outputs) * (len(outputs) == len(targets))


@pytest.mark.parametrize("counted", [COUNT, 4, 0])
def test_own_metrics_wait_for_none_of_their_batches(counted: int):
    measure = OwnMetrics({"sums": Sums, "first": lambda outputs, targets: outputs[:, 0]})
    with Operations() as counter:
        measure.update(batch(counted=counted), torch.empty(COUNT, 3, device=META), torch.empty(COUNT, device=META))
    assert measure._counters["sums"].rows == counted
    assert "a blocking copy" not in counter.waits


def test_the_counter_would_see_what_waits():
    """As batches came before they were brought to the device."""
    on_host = replace(batch(), labels=torch.zeros(COUNT, dtype=torch.int64))
    task = classification(kind="softmax", labels="single")
    with Operations() as counted:
        on_host.labels.to(META)
        to_device(on_host.labels, META)
        task.engine.predict()
    assert counted.waits == {"a blocking copy": 1}
