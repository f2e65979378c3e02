"""Score a model on one data set: features, then few-shot least squares, a linear probe or kNN.

Random choices are by hash, so results depend only on the model, the shards and the settings.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Fault
from shardvit.data_shards.reading.shard_reader import UNKNOWN, label_column
from shardvit.pipeline.transfer.classifiers import fit_least_squares, fit_probe, knn_votes
from shardvit.pipeline.transfer.features import (
    Features,
    FeatureStore,
    Int64s,
    choose_images,
    choose_shots,
    shot_features,
)
from shardvit.pipeline.transfer.results import Setting, TransferScore, UsedSet
from shardvit.pipeline.transfer.settings import FewShotSettings, KnnSettings, ProbeSettings, Settings, TransferSet

_BLOCK = 8192  # images scored at a time
_TOP5_CLASSES = 6  # fewer classes get no top-5


@dataclass(frozen=True)
class SetMeasured:
    """Scores of one data set."""

    used: UsedSet
    scores: tuple[TransferScore, ...]
    faults: tuple[Fault, ...] = ()
    # seed -> class -> samples of the largest number of shots, in the order drawn
    shots: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def measure(features: FeatureStore, data: TransferSet, settings: Settings, *, most_images: int | None) -> SetMeasured:
    """Measure one set on at most `most_images` training images (None: all); UserError if a set cannot be read."""
    chosen = None
    if most_images is not None and most_images < data.train.num_samples:
        chosen = choose_images(data.train.num_samples, most=most_images)
    if isinstance(settings, FewShotSettings):
        return _few_shot(features, data, settings, chosen=chosen)
    train = features.features(data.train, store=data.store, samples=chosen)
    held_out = features.features(data.eval, store=data.store)
    match settings:
        case ProbeSettings():
            scores = _probe(features, data, settings, train=train, held_out=held_out)
        case KnnSettings():
            scores = _knn(features, data, settings, train=train, held_out=held_out)
    return _measured(data, scores, train=train, held_out=held_out)


def _few_shot(
    features: FeatureStore, data: TransferSet, settings: FewShotSettings, *, chosen: Int64s | None
) -> SetMeasured:
    labels = label_column(data.train, store=data.store)
    if chosen is not None:
        rest = np.ones(len(labels), dtype=np.bool_)
        rest[chosen] = False
        labels[rest] = UNKNOWN
    train, by_seed = shot_features(
        labels,
        shots=max(settings.shots),
        seeds=settings.seeds,
        features_of=lambda samples: features.features(data.train, store=data.store, samples=samples),
    )
    held_out = features.features(data.eval, store=data.store)
    scores: list[TransferScore] = []
    for shots in settings.shots:
        accuracies: list[float] = []
        strengths: list[float] = []
        images = 0
        for seed in range(settings.seeds):
            taken = choose_shots(labels, shots=shots, seed=seed)
            rows, images = train.rows_of(taken), len(taken)
            fitted = fit_least_squares(
                train.values[rows],
                train.labels[rows],
                num_classes=data.train.num_classes,
                l2=settings.l2,
                device=features.predictor.device,
            )
            right = sum(
                int((fitted(held_out.values[start : start + _BLOCK]).argmax(dim=1).cpu() == part).sum())
                for start, part in _blocks(held_out.labels)
            )
            accuracies.append(right / len(held_out.labels))
            strengths.append(fitted.strength)
        l2 = strengths[0] if len(set(strengths)) == 1 else strengths
        given: dict[str, Setting] = {"shots": shots, "images": images, "l2": l2, "seeds": settings.seeds}
        scores += _scores(data, settings, {"top1": accuracies}, given=given)
    counts = np.bincount(labels[labels >= 0], minlength=data.train.num_classes)
    notes = tuple(
        f"{few:,} of {len(counts):,} classes have fewer than {shots} images to learn from: all that they have are taken"
        for shots in settings.shots
        if (few := int((counts < shots).sum()))
    )
    drawn = {
        seed: {int(label): samples[labels[samples] == label].tolist() for label in np.unique(labels[samples])}
        for seed, samples in by_seed.items()
    }
    return replace(_measured(data, scores, train=train, held_out=held_out), notes=notes, shots=drawn)


def _probe(
    features: FeatureStore, data: TransferSet, settings: ProbeSettings, *, train: Features, held_out: Features
) -> list[TransferScore]:
    try:
        probe = fit_probe(
            train.values,
            train.labels,
            samples=train.samples,
            num_classes=data.train.num_classes,
            c=settings.c,
            hold_out=settings.hold_out,
            device=features.predictor.device,
            progress=lambda far: features.clock.set_status("fitting", far),
        )
    except ValueError as error:
        raise UserError(f"{data.train.source}: {error}") from None
    first = fifth = 0
    loss = 0.0
    for start, labels in _blocks(held_out.labels):
        logs = probe(held_out.values[start : start + _BLOCK]).cpu()
        hits = _ranked(logs, labels)
        first, fifth = first + hits[0], fifth + hits[1]
        loss -= float(logs.gather(1, labels[:, None]).sum())
    count = len(held_out.labels)
    metrics = {"top1": [first / count], "top5": [fifth / count], "loss": [loss / count]}
    if math.isinf(loss):  # a class without a training image
        del metrics["loss"]
    return _scores(data, settings, metrics, given={"c": probe.seen.strength})


def _knn(
    features: FeatureStore, data: TransferSet, settings: KnnSettings, *, train: Features, held_out: Features
) -> list[TransferScore]:
    votes = knn_votes(
        held_out.values,
        train=train.values,
        labels=train.labels,
        num_classes=data.train.num_classes,
        k=settings.k,
        temperature=settings.temperature,
        device=features.predictor.device,
        progress=lambda far: features.clock.set_status("finding neighbours", far),
    )
    scores: list[TransferScore] = []
    for k, table in zip(settings.k, votes, strict=True):
        first, fifth = _ranked(table, held_out.labels)
        count = len(held_out.labels)
        given: dict[str, Setting] = {"k": k, "temperature": settings.temperature}
        scores += _scores(data, settings, {"top1": [first / count], "top5": [fifth / count]}, given=given)
    return scores


def _scores(
    data: TransferSet, settings: Settings, metrics: dict[str, list[float]], *, given: dict[str, Setting]
) -> list[TransferScore]:
    few = data.train.num_classes < _TOP5_CLASSES
    return [
        TransferScore(
            data_set=data.name,
            group=data.group,
            method=settings.method,
            metric=name,
            value=statistics.fmean(values),
            values=tuple(values),
            settings=dict(given),
        )
        for name, values in metrics.items()
        if not (few and name == "top5")
    ]


def _ranked(scores: torch.Tensor, labels: torch.Tensor) -> tuple[int, int]:
    """Count top-1 and top-5 hits; ties go to the first class."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :5]
    hits = order == labels[:, None]
    return int(hits[:, 0].sum()), int(hits.any(dim=1).sum())


def _blocks(labels: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(start, labels[start : start + _BLOCK]) for start in range(0, len(labels), _BLOCK)]


def _measured(
    data: TransferSet, scores: Sequence[TransferScore], *, train: Features, held_out: Features
) -> SetMeasured:
    faults = {(each.shard, each.key): each for each in (*train.faults, *held_out.faults)}
    used = UsedSet(
        name=data.name,
        train=data.train.source,
        eval=data.eval.source,
        train_digest=data.train.digest,
        eval_digest=data.eval.digest,
        num_classes=data.train.num_classes,
        train_images=len(train.samples),
        eval_images=len(held_out.samples),
        damaged_images=len(train.damaged) + len(held_out.damaged),
        group=data.group,
    )
    return SetMeasured(used, tuple(scores), tuple(faults.values()))
