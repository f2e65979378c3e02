"""Evaluate a model on a held-out set: every sample exactly once, at any world size; collective.

Loss, rank of the true class, confidence and top five of each image stay on the device until the end: 132 bytes (6.6 MB
for 50,000), copies that keep no batch alive. The host waits for the batch before the last one, asleep, so the device is
never idle and holds two batches. The ranks then exchange 72 bytes an image and sort them in set order; batches hold the
same samples at any world size (`EvalBatches`), so counts and sums are bit-identical. Mean average precision needs all
scores: they leave the device batch by batch (`score_file`) and are exchanged a few classes at a time, 64 MiB of them
(held four times over). Keys and top five are exchanged for 128 images.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch

from shardvit.data_shards.loading.batch import Batch
from shardvit.pipeline.evaluation import scores
from shardvit.pipeline.evaluation.own_metrics import OwnMetrics
from shardvit.pipeline.evaluation.score_file import ScoreFile
from shardvit.pipeline.evaluation.scores import Answered, average_precision
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.vocabulary import OWN_SET, EvalMetric, WeightsKind
from shardvit.pipeline.runs.evaluations import KEPT_SAMPLES, Evaluation, Floats, Judged, PerClass, save_evaluation
from shardvit.pipeline.stage.task import TOP, Classification, Tally, Task

_CHUNK_BYTES = 64 * 2**20  # of all images' scores in one exchange


class Exchange(Protocol):
    """Methods of the process group that evaluation uses."""

    @property
    def place(self) -> Place: ...

    def gather(self, values: torch.Tensor) -> torch.Tensor: ...

    def gather_objects(self, value: Any) -> list[Any]: ...


class Notes(Protocol):
    """Records damaged images."""

    def note(self, batch: Batch, *, use: str, rows: int) -> None: ...


@dataclass(frozen=True)
class Evaluated:
    """Result of `evaluate`, equal on every rank."""

    metrics: dict[str, float]
    record: Evaluation | None  # None without classes


@dataclass
class Kept:
    """This rank's results by batch, on the device unless stated."""

    samples: list[torch.Tensor] = field(default_factory=list)  # int64 on the host, -1 for rows that do not count
    columns: list[torch.Tensor] = field(default_factory=list)  # float64 [rows, columns], see `_columns`
    keys: list[str] = field(default_factory=list)
    labels: list[torch.Tensor] = field(default_factory=list)
    top: list[torch.Tensor] = field(default_factory=list)
    probabilities: list[torch.Tensor] = field(default_factory=list)
    scores: ScoreFile | None = None  # on the host, for mean average precision
    _last: tuple[Callable[[], object], torch.Tensor | None] = bool, None  # the last batch: a wait, its scores by class

    def add(self, batch: Batch, tally: Tally, *, task: Task, outputs: torch.Tensor) -> None:
        """Add a batch and wait for the one before. Copies: a view would keep all of its batch's memory."""
        self.samples.append(torch.where(batch.counted, batch.samples, -1))
        self.columns.append(_columns(tally))
        if tally.answers is not None and isinstance(task, Classification):
            self.keys += batch.keys
            # An own task's classes need not be those of the shards.
            self.labels.append((tally.answers.true if task.label_kind == "single" else batch.labels).clone())
            self.top.append(tally.answers.top.clone())
            self.probabilities.append(tally.answers.probabilities.clone())
        last = _leaving(None if self.scores is None else outputs.t().contiguous(), device=outputs.device)
        self.settle()
        self._last = last

    def settle(self) -> None:
        """Wait for the last batch, and keep its scores."""
        (wait, by_class), self._last = self._last, (bool, None)
        wait()
        if self.scores is not None and by_class is not None:
            self.scores.add(by_class)


def _leaving(scores: torch.Tensor | None, *, device: torch.device) -> tuple[Callable[[], object], torch.Tensor | None]:
    """Start copying to the host. Returns a wait for the device's work so far, asleep, and where the scores arrive."""
    if device.type != "cuda":
        return bool, scores
    if scores is not None:
        scores = torch.empty(scores.shape, pin_memory=True).copy_(scores, non_blocking=True)
    done = torch.cuda.Event(blocking=True)
    done.record()
    return done.synchronize, scores


def evaluate(
    batches: Iterable[Batch],
    *,
    task: Task,
    ranks: Exchange,
    faults: Notes,
    of: WeightsKind = "weights",
    set_name: str = OWN_SET,
    metrics: Sequence[EvalMetric] = (),
    own: Mapping[str, Any] = MappingProxyType({}),
    progress: Callable[[], None] = lambda: None,
) -> Evaluated:
    """Evaluate `batches`, padded to equally many on all ranks; collective.

    Damaged images go to `faults` and do not count. Metrics are "val/loss", "val/SCORE" (`task.score`), "val/images"
    (the readable samples), the user's `own`, and, for a classifier, baselines and `metrics`. Another set's are
    "val_NAME/...", the moving average's (`of` "ema") "val/ema_...". The caller swaps the weights.
    """
    keeps: Literal["scores", "tallies"] = "scores" if "mean_average_precision" in metrics else "tallies"
    use = "eval" if set_name == OWN_SET else f"eval {set_name}"
    measure = OwnMetrics(own)
    kept = run_model(batches, task=task, faults=faults, use=use, keeps=keeps, own=measure, progress=progress)
    found = _Gathered(kept, ranks)
    answered = found.answered
    values, record = {"val/loss": scores.mean_loss(answered)}, None
    if task.score != "loss":
        values[f"val/{task.score}"] = scores.share_right(answered)
    if isinstance(task, Classification):
        classes = _per_class(found, task)
        values |= _class_metrics(found, classes, task=task, metrics=metrics, of=of)
        with_bins = task.label_kind == "single" and "calibration_error" in metrics
        record = _record(found, classes, task=task, set_name=set_name, of=of, with_bins=with_bins)
    values |= {f"val/{name}": value for name, value in measure.results(found.mine[:, 0], ranks=ranks).items()}
    if of == "weights":
        values["val/images"] = float(answered.images)
    group = "val" if set_name == OWN_SET else f"val_{set_name}"
    group += {"weights": "/", "ema": "/ema_"}[of]
    named = {name.replace("val/", group, 1): value for name, value in values.items()}
    return Evaluated(named, record and replace(record, metrics=named))


def keep_evaluations(stage_folder: Path, found: Iterable[Evaluated], *, step: int, say: Callable[[str], None]) -> None:
    """Save the evaluations; if the disk fails, say so and continue."""
    for each in found:
        if each.record is not None:
            try:
                save_evaluation(stage_folder, each.record, step=step)
            except OSError as error:
                say(f"step {step}: the evaluation of {each.record.set_name} was not kept ({error.strerror})")


def run_model(
    batches: Iterable[Batch],
    *,
    task: Task,
    faults: Notes,
    use: str = "eval",
    keeps: Literal["scores", "tallies"] = "tallies",
    own: OwnMetrics | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Kept:
    """Run this rank's forward passes, a batch ahead of the device. `use` names the set in `faults`."""
    kept, engine = Kept(scores=ScoreFile() if keeps == "scores" else None), task.engine
    engine.module.eval()
    for batch in batches:
        progress()
        faults.note(batch, use=use, rows=len(batch.counted))
        example = task.example(batch, use="eval")
        outputs = engine.predict(*example.inputs).float()
        tally = task.tally(outputs, example.targets)
        if own is not None:
            own.update(batch, outputs, example.targets)
        kept.add(batch, tally, task=task, outputs=outputs)
        del example, outputs, tally  # before the next batch takes memory
    kept.settle()
    engine.module.train()
    return kept


def _columns(tally: Tally) -> torch.Tensor:
    """[rows, 3], for a classifier [rows, 8]: loss, right, predictions; rank, true, predicted, probabilities."""
    columns = [tally.loss, tally.right, tally.predictions]
    if (found := tally.answers) is not None:
        columns += [found.rank, found.true, found.top[:, 0], found.probabilities[:, 0], found.probability_of_true]
    return torch.stack([each.double() for each in columns], dim=1)


class _Gathered:
    """This rank's results and those of all images; collective. The host waits for the device here."""

    def __init__(self, kept: Kept, ranks: Exchange) -> None:
        self.kept, self.ranks = kept, ranks
        # float64 [rows, 1 + columns]; column 0 is the sample's number
        self.mine = torch.cat([torch.cat(kept.samples)[:, None].double(), torch.cat(kept.columns).cpu()], dim=1)
        self.answered = _answered(ranks.gather(self.mine.flatten()).view(-1, self.mine.shape[1]))

    def labels(self) -> torch.Tensor:
        """This rank's labels on the host, int64 [rows, most labels of an image], padded with -1."""
        parts = [each[:, None] if each.ndim == 1 else each for each in self.kept.labels]
        width = max(each.shape[1] for each in parts)
        return torch.cat([torch.nn.functional.pad(each.cpu(), (0, width - each.shape[1]), value=-1) for each in parts])

    def judged(self, chosen: np.ndarray) -> dict[int, Judged]:
        """Return details of the chosen samples by number; collective."""
        kept, samples = self.kept, self.mine[:, 0].long().numpy()
        rows = np.flatnonzero(np.isin(samples, chosen) & (samples >= 0))
        found: dict[int, Judged] = {}
        if len(rows):
            top, shares = torch.cat(kept.top)[rows].cpu(), torch.cat(kept.probabilities)[rows].double().cpu()
            labels = self.labels()[rows]
            for at, row in enumerate(rows.tolist()):
                true = tuple(each for each in labels[at].tolist() if each >= 0)
                best = tuple(zip(top[at].tolist(), shares[at].tolist(), strict=True))
                of_true = float(self.mine[row, 8]) if true else math.nan
                number = int(samples[row])
                found[number] = Judged(number, kept.keys[row], true, best[0][0], best[0][1], of_true, best)
        return {number: each for part in self.ranks.gather_objects(found) for number, each in part.items()}

    def average_precisions(self, *, labels: torch.Tensor, num_classes: int) -> Floats:
        """[C]; the ranks share the sorting by class; collective."""
        mine, place = self.mine, self.ranks.place
        found = torch.zeros(num_classes, dtype=torch.float64)
        width = max(1, _CHUNK_BYTES // (16 * len(mine) * place.world_size))
        assert self.kept.scores is not None
        for first in range(0, num_classes, width):
            number = min(width, num_classes - first)
            part = self.kept.scores.read(first, count=number).double()
            has = torch.stack([(labels == first + at).any(dim=1) for at in range(number)], dim=1).double()
            rows = self.ranks.gather(torch.cat([mine[:, :1], part, has], dim=1).flatten()).view(-1, 1 + 2 * number)
            rows = rows[rows[:, 0] >= 0]
            for at in range(number):
                if (first + at) % place.world_size == place.rank:
                    positive = rows[:, 1 + number + at].numpy() > 0
                    found[first + at] = average_precision(rows[:, 1 + at].numpy(), positive=positive)
        return self.ranks.gather(found).sum(dim=0).numpy()


def _answered(rows: torch.Tensor) -> Answered:
    table = rows[rows[:, 0] >= 0].numpy()
    table = table[np.argsort(table[:, 0])]
    assert len(np.unique(table[:, 0])) == len(table), "a sample was evaluated twice"
    columns = [*table.T, *[np.zeros(0)] * (9 - table.shape[1])]
    sample, rank, true, predicted = (each.astype(np.int64) for each in (columns[0], *columns[4:7]))
    loss, right, predictions, probability, of_true = [*columns[1:4], *columns[7:]]
    return Answered(sample, loss, right, predictions, rank, true, predicted, probability, of_true)


def _per_class(found: _Gathered, task: Classification) -> PerClass:
    num_classes, mine = len(task.classes), found.mine
    answers = np.bincount(found.answered.predicted, minlength=num_classes)
    if task.label_kind == "single":
        return replace(scores.per_class(found.answered, num_classes=num_classes), answers=answers)
    labels, counts = found.labels(), mine[:, 0] >= 0
    sums = torch.zeros(2, num_classes, dtype=torch.int64)
    for number, rows in enumerate((counts, counts & (mine[:, 4] == 0))):
        of_rows = labels[rows]
        sums[number] = torch.bincount(of_rows[of_rows >= 0], minlength=num_classes)
    images, right = found.ranks.gather(sums.flatten()).sum(dim=0).long().view(2, num_classes).numpy()
    precisions = found.kept.scores and found.average_precisions(labels=labels, num_classes=num_classes)
    return PerClass(images, right, scores.shares(right, of=images), precisions, answers=answers)


def _class_metrics(
    found: _Gathered, classes: PerClass, *, task: Classification, metrics: Sequence[EvalMetric], of: WeightsKind
) -> dict[str, float]:
    answered, values = found.answered, dict[str, float]()
    if task.label_kind == "single":
        values["val/balanced_accuracy"] = scores.balanced_accuracy(classes)
    if of == "weights" and answered.images:
        values["val/commonest_class_share"] = int(classes.images.max()) / answered.images
    for name in metrics:
        match name:
            case "top5":
                values["val/top5"] = scores.top_share(answered, k=TOP)
            case "precision_at_1":
                values["val/precision_at_1"] = scores.share_right(answered)
            case "calibration_error":
                values["val/calibration_error"] = scores.calibration_error(scores.calibration(answered))
            case "mean_average_precision":
                assert classes.average_precision is not None
                known = classes.average_precision[~np.isnan(classes.average_precision)]
                values["val/mean_average_precision"] = math.fsum(known) / len(known) if len(known) else math.nan
    return values


def _record(
    found: _Gathered, classes: PerClass, *, task: Classification, set_name: str, of: WeightsKind, with_bins: bool
) -> Evaluation:
    answered, single = found.answered, task.label_kind == "single"
    examples = answered.sample[answered.sample < KEPT_SAMPLES]
    mistakes = scores.worst(answered, count=KEPT_SAMPLES)
    judged = found.judged(np.union1d(examples, mistakes))
    return Evaluation(
        set_name=set_name,
        classes=tuple(task.classes),
        label_kind=task.label_kind,
        images=answered.images,
        metrics={},
        per_class=classes,
        confusion=scores.confusion_matrix(answered, num_classes=len(task.classes)) if single else None,
        calibration=scores.calibration(answered) if with_bins else None,
        mistakes=tuple(judged[number] for number in mistakes.tolist()),
        examples=tuple(judged[number] for number in examples.tolist()),
        weights=of,
    )
