"""The shards of `shardvit eval`, and what is asked of them. No torch: what does not fit is said before it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from data_shards.errors import UserError
from data_shards.reading.opening import open_shards
from data_shards.shards.shard_set import ShardSet, ShardsSpec
from data_shards.store.cache import CacheConfig
from data_shards.store.store import Store
from pipeline.evaluation.request import EvalRequest
from pipeline.evaluation.truth import Truth, find_truth
from pipeline.recipe.metrics import chosen_metrics
from pipeline.recipe.vocabulary import EvalMetric


def open_set(request: EvalRequest, *, report: Callable[[str], None]) -> tuple[ShardSet, Store]:
    """The shards, and what reads them; damage is reported."""
    store = Store(CacheConfig(), commands="run")
    spec = ShardsSpec(
        request.shards,
        label=request.label,
        kind=request.label_kind,
        classes=Path(request.class_file) if request.class_file else None,
    )
    shards = open_shards(spec, damaged="report", report=report, store=store)
    if not shards.num_samples:
        raise UserError(f"{shards.source} has no images")
    for line in shards.damage:
        report(line)
    return shards, store


def what_is_asked(
    request: EvalRequest, *, class_names: Sequence[str], shards: ShardSet
) -> tuple[Truth, tuple[EvalMetric, ...]]:
    """Of a model with these classes on these shards. UserError: they do not fit."""
    truth = find_truth(class_names, shards, label_set=request.label_set, matching=request.matching, among=request.among)
    if request.label_set == "real" and request.metrics == "auto":
        return truth, ("top5",)
    metrics = chosen_metrics(
        request.metrics,
        label_kind=truth.label_kind,
        num_classes=len(truth.classes),
        num_images=shards.num_samples,
        flag="--metrics",
    )
    return truth, metrics
