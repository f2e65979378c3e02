"""What an evaluation keeps of its batches: numbers per image, and no batch. The scores of all images leave the device.

Batches are views of one buffer each, as some loaders pack them: whatever shares memory with one keeps all of it.
"""

import errno
import io
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.vocabulary import GOOGLES, LabelKind
from shardvit.model.loss import loss_function
from shardvit.pipeline.evaluation import evaluate as module
from shardvit.pipeline.evaluation import score_file
from shardvit.pipeline.evaluation.evaluate import Kept, evaluate, run_model
from shardvit.pipeline.evaluation.score_file import ScoreFile
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.stage.task import Classification

ROWS, SIZE, CLASSES, LABELS = 6, 16, 7, 3
FAULTS: Any = SimpleNamespace(note=lambda batch, *, use, rows: None)


def packed(number: int, *, labels: LabelKind, buffers: list[weakref.ref[Any]]) -> Batch:
    """Images, flips and labels in one buffer, whose end of life shows."""
    shape = (ROWS,) if labels == "single" else (ROWS, LABELS)
    image_bytes, label_bytes = ROWS * SIZE * SIZE * 3, 8 * int(np.prod(shape))
    draw = np.random.default_rng(number)
    buffer = draw.integers(0, 2, image_bytes + label_bytes + ROWS, dtype=np.uint8)
    buffers.append(weakref.ref(buffer))
    whole = torch.from_numpy(buffer)
    of_labels = whole[image_bytes : image_bytes + label_bytes].view(torch.int64).view(shape)
    of_labels.copy_(torch.from_numpy(draw.integers(0 if labels == "single" else -1, CLASSES, shape)))
    return Batch(
        images=whole[:image_bytes].view(ROWS, SIZE, SIZE, 3),
        labels=of_labels,
        mirrored=whole[image_bytes + label_bytes :].view(torch.bool),
        counted=torch.ones(ROWS, dtype=torch.bool),
        substituted=torch.zeros(ROWS, dtype=torch.bool),
        samples=torch.arange(ROWS) + ROWS * number,
        epochs=torch.zeros(ROWS, dtype=torch.int64),
        keys=tuple(f"{number}/{row}" for row in range(ROWS)),
    )


def task_of(labels: LabelKind) -> Classification:
    weights = torch.randn(SIZE * SIZE * 3, CLASSES, generator=torch.Generator().manual_seed(1))
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"),
        input_dtype=torch.float32,
        module=torch.nn.Module(),
        predict=lambda images: images.flatten(1) @ weights,
    )
    return Classification(
        engine=engine,
        classes=tuple("abcdefg"),
        label_kind=labels,
        normalisation=GOOGLES,
        train_loss=loss_function("sigmoid"),
        loss_kind="softmax" if labels == "single" else "sigmoid",
    )


def storage_bytes(kept: Kept) -> int:
    """Of all that its tensors keep alive."""
    tensors = [each for part in vars(kept).values() if isinstance(part, list) for each in part]
    storages = [each.untyped_storage() for each in tensors if isinstance(each, torch.Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@pytest.mark.parametrize("batches", [3, 20])
@pytest.mark.parametrize("labels", ["single", "multi"])
def test_an_evaluation_keeps_numbers_per_image_and_two_batches_at_most(labels: LabelKind, batches: int):
    buffers: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def stream() -> Iterator[Batch]:
        for number in range(batches):
            alive.append(sum(each() is not None for each in buffers))
            yield packed(number, labels=labels, buffers=buffers)

    kept = run_model(stream(), task=task_of(labels), faults=FAULTS)
    assert max(alive) == 1  # the one in hand, while the next is made
    assert [each() for each in buffers] == [None] * batches
    sample, columns, top, shares = 8, 8 * 8, 8 * 5, 4 * 5
    per_image = sample + columns + top + shares + 8 * (1 if labels == "single" else LABELS)
    assert storage_bytes(kept) == batches * ROWS * per_image


def test_the_count_would_see_a_batch_that_is_kept():
    kept, buffers = Kept(), list[weakref.ref[Any]]()
    kept.labels.append(packed(0, labels="single", buffers=buffers).labels)
    assert storage_bytes(kept) > ROWS * SIZE * SIZE * 3 and buffers[0]() is not None


class LateDevice:
    """Copies to the host are done when they are waited for, and leave nonsense until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waited = list[int]()
        monkeypatch.setattr(module, "_leaving", self._leaving)

    def _leaving(self, scores: torch.Tensor, *, device: torch.device) -> tuple[Any, torch.Tensor]:
        late, number = torch.full_like(scores, 1e9), len(self.copies)
        self.copies.append((late, scores.clone()))

        def wait() -> None:
            self.waited.append(number)
            late.copy_(self.copies[number][1])

        return wait, late


def test_the_host_waits_for_the_batch_before_and_scores_are_read_when_they_have_arrived(
    monkeypatch: pytest.MonkeyPatch,
):
    device, seen = LateDevice(monkeypatch), list[list[int]]()

    def stream() -> Iterator[Batch]:
        for number in range(5):
            seen.append(list(device.waited))
            yield packed(number, labels="multi", buffers=[])

    kept = run_model(stream(), task=task_of("multi"), faults=FAULTS, keeps="scores")
    assert seen == [[], [], [0], [0, 1], [0, 1, 2]] and device.waited == [0, 1, 2, 3, 4]
    assert kept.scores is not None
    expected = torch.cat([late.t() for _, late in device.copies])
    assert torch.equal(kept.scores.read(0, count=CLASSES), expected)


def test_a_gpu_is_waited_for_asleep(monkeypatch: pytest.MonkeyPatch):
    """An event that is not "blocking" is waited for by a core that does nothing else."""
    calls: list[str] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            calls.append("recorded")

        def synchronize(self) -> None:
            calls.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    wait, scores = module._leaving(None, device=torch.device("cuda"))
    assert calls == ["recorded"] and scores is None
    wait()
    assert calls == ["recorded", "waited"]


@pytest.mark.parametrize("in_memory", [1 << 20, 500, 0])
def test_scores_in_memory_and_in_a_file_read_the_same(monkeypatch: pytest.MonkeyPatch, in_memory: int):
    monkeypatch.setattr(score_file, "_IN_MEMORY_BYTES", in_memory or 1)
    draw = torch.Generator().manual_seed(2)
    parts = [torch.randn(rows, 11, generator=draw) for rows in (4, 4, 4, 1, 3)]
    parts[1][2, 3], parts[2][0, 10] = torch.nan, -torch.inf
    kept = ScoreFile()
    for part in parts:
        kept.add(part.t().contiguous())
    whole = torch.cat(parts)
    for first, count in ((0, 11), (0, 1), (10, 1), (3, 5)):
        read = kept.read(first, count=count)
        assert read.dtype is torch.float32
        assert np.array_equal(read.numpy(), whole[:, first : first + count].numpy(), equal_nan=True)


def test_mean_average_precision_is_the_same_to_the_last_bit_wherever_scores_are_and_however_few_are_exchanged(
    monkeypatch: pytest.MonkeyPatch,
):
    ranks: Any = SimpleNamespace(
        place=Place(), gather=lambda values: values.double().flatten()[None], gather_objects=lambda value: [value]
    )

    def found() -> tuple[dict[str, float], bytes]:
        batches = [packed(number, labels="multi", buffers=[]) for number in range(8)]
        result = evaluate(
            batches, task=task_of("multi"), ranks=ranks, faults=FAULTS, metrics=("mean_average_precision",)
        )
        assert result.record is not None and result.record.per_class.average_precision is not None
        return result.metrics, result.record.per_class.average_precision.tobytes()

    usual = found()
    assert 0 < usual[0]["val/mean_average_precision"] < 1
    monkeypatch.setattr(score_file, "_IN_MEMORY_BYTES", 1)
    assert found() == usual
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)  # a class at a time
    assert found() == usual


def test_a_full_disk_is_one_sentence_that_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", lambda max_size: Full())
    with pytest.raises(UserError, match=rf"{tmp_path}.*No space left.*TMPDIR"):
        ScoreFile().add(torch.zeros(2, 3))
