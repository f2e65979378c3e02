"""Open the shards of `shardvit eval` and map their labels (or others) to the model's classes.

Classes match by name, in any order; shards may have only some of them. ImageNet's names differ between models ("tench",
"tench, Tinca tinca", "0"), so its classes are identified by WordNet number (n01440764), or by position if all 1,000
come in the usual order. ReaL labels (arXiv 2006.07159) are found by sample key; timm ships both. Imports torch only
when batches arrive.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import named, one_line
from shardvit.data_shards.vocabulary import EvalProtocol, LabelKind
from shardvit.pipeline.recipe.vocabulary import EvalMetric, WeightsKind

if TYPE_CHECKING:
    from shardvit.data_shards.loading.batch import Batch
    from shardvit.data_shards.shards.shard_set import ShardSet
    from shardvit.data_shards.store.store import Store


_CLASSES = 1000
_REAL_FILE = "_info/imagenet_real_labels.json"
_NUMBER = re.compile(r"n\d{8}")  # a WordNet number
_KEY = re.compile(r"ILSVRC2012_val_(\d{8})")
_MOST_RENAMED = 0.1  # share of classes that other projects renamed


@cache
def wordnet_numbers() -> tuple[str, ...]:
    """WordNet numbers of class 0, 1, ...; the usual class order sorts by them."""
    from timm.data.imagenet_info import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


def usual_classes(names: Sequence[str]) -> list[int] | None:
    """ImageNet class number of each name; None if they are not ImageNet's classes or ambiguous."""
    if all(map(_NUMBER.fullmatch, names)):  # else skip importing timm, which takes seconds
        numbers = {name: number for number, name in enumerate(wordnet_numbers())}
        if all(name in numbers for name in names):
            return [numbers[name] for name in names]
    return list(range(_CLASSES)) if _are_in_usual_order(names) else None


def numbered_classes(names: Sequence[str]) -> list[int] | None:
    """Class numbers of names that are numbers, such as ImageNet-v2's folders; else None."""
    known = {str(number) for number in range(_CLASSES)}
    return [int(name) for name in names] if known.issuperset(names) else None


def real_labels(key: str) -> tuple[int, ...] | None:
    """An image's ReaL labels, possibly none; None if the key names no validation image (ILSVRC2012_val_00050000)."""
    found = _KEY.search(key)
    every = _real()
    if found is None or not 1 <= int(found[1]) <= len(every):
        return None
    return every[int(found[1]) - 1]


def _are_in_usual_order(names: Sequence[str]) -> bool:
    if len(names) != _CLASSES:
        return False
    if list(names) == [str(number) for number in range(_CLASSES)]:
        return True
    from timm.data.imagenet_info import ImageNetInfo

    usual = ImageNetInfo("imagenet-1k").label_descriptions()
    alike = sum(_first(name) == _first(other) for name, other in zip(names, usual, strict=True))
    return alike >= (1 - _MOST_RENAMED) * _CLASSES


def _first(name: str) -> str:
    return name.partition(",")[0].strip().lower().replace("_", " ")


@cache
def _real() -> tuple[tuple[int, ...], ...]:
    content = pkgutil.get_data("timm.data", _REAL_FILE)
    assert content is not None
    return tuple(map(tuple, json.loads(content)))


LabelSet = Literal["shards", "real", "imagenet_v2"]
Matching = Literal["names", "index"]
Among = Literal["model", "shards"]


@dataclass(frozen=True)
class EvalRequest:
    """Model, shards and flags, as plain values that go to processes as JSON."""

    model: str
    shards: str
    max_image_pixels: int
    label: str | None = None  # this and the next two: for tars without a manifest
    multi_label: bool = False
    class_names: Path | None = None
    labels: LabelSet = "shards"
    classes: Matching = "names"
    among: Among = "model"
    metrics: tuple[EvalMetric, ...] | None = None  # None: those that fit
    own_metrics: tuple[str, ...] = ()  # FILE:NAME
    trust: Path | None = None  # file of the model, if that is own code
    protocol: EvalProtocol | None = None  # None: from the model's record; crop_share likewise
    crop_share: float | None = None
    weights: WeightsKind | None = None
    batch_size: int = 64
    workers: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class Truth:
    """Correct labels, as indices into the classes the model chooses among."""

    classes: tuple[str, ...]
    columns: tuple[int, ...] | None  # the model's outputs for `classes`; None: all
    labels: tuple[int, ...]  # index in `classes` of each shard class, or of each ImageNet class (ReaL)
    label_kind: LabelKind
    label_set: LabelSet

    def relabelled(self, batch: Batch) -> Batch:
        """Relabel a batch on the host; images without a ReaL label do not count."""
        import torch

        if self.label_set != "real":
            return replace(batch, labels=torch.tensor([*self.labels, -1])[batch.labels])  # -1 is padding
        rows: list[list[int]] = []
        for key, counts in zip(batch.keys, batch.counted.tolist(), strict=True):
            found = real_labels(key)
            if found is None and counts:
                raise UserError(
                    f"--labels real: the sample {one_line(key)!r} is none of ImageNet's validation images, whose names "
                    "end in ILSVRC2012_val_ and eight digits: pack the shards with these names"
                )
            rows.append([self.labels[each] for each in found or ()])
        width = max(1, *map(len, rows))
        labels = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])
        return replace(batch, labels=labels, counted=batch.counted & torch.tensor([bool(row) for row in rows]))


def find_truth(
    model_classes: Sequence[str], shards: ShardSet, *, label_set: LabelSet, matching: Matching, among: Among
) -> Truth:
    """Match the classes; UserError if they do not fit."""
    model, ours = tuple(model_classes), shards.classes
    whole: LabelKind = "multi" if shards.is_multi_label else "single"
    if label_set != "shards":
        if among == "shards" or matching == "index":
            flag = "--among shards" if among == "shards" else "--classes index"
            raise UserError(f"{flag}: with --labels {label_set} classes are ImageNet's own; leave it out")
        known = usual_classes(model)
        if known is None or len(set(known)) != 1000:
            raise UserError(
                f"--labels {label_set}: the model's classes ({named(model)}) are not ImageNet's 1,000: evaluate it on "
                "labels of its own"
            )
        column = {number: at for at, number in enumerate(known)}
        if label_set == "real":
            return Truth(model, None, tuple(column[each] for each in range(1000)), "multi", label_set)
        folders = numbered_classes(ours) or usual_classes(ours)
        if folders is None:
            raise UserError(
                f"--labels imagenet_v2: the classes of {shards.source} ({named(ours)}) are not its folders, 0 to 999: "
                "leave it out, and classes are matched by name"
            )
        return Truth(model, None, tuple(column[each] for each in folders), whole, label_set)
    columns = _columns(model, ours, matching=matching, source=shards.source)
    if among == "shards":
        return Truth(ours, columns, tuple(range(len(ours))), whole, label_set)
    return Truth(model, None, columns, whole, label_set)


def _columns(model: tuple[str, ...], ours: tuple[str, ...], *, matching: Matching, source: str) -> tuple[int, ...]:
    """The model's output for each shard class."""
    if matching == "index":
        if len(ours) > len(model):
            raise UserError(f"--classes index: {source} has {len(ours):,} classes and the model {len(model):,}")
        return tuple(range(len(ours)))
    if ours == model:
        return tuple(range(len(ours)))
    place = {name: number for number, name in enumerate(model)}
    if len(place) == len(model) and place.keys() >= set(ours):
        return tuple(place[name] for name in ours)
    wanted = usual_classes(ours)
    theirs = None if wanted is None else usual_classes(model)
    if theirs is not None and wanted is not None and set(wanted) <= set(theirs):
        at = {number: column for column, number in enumerate(theirs)}
        return tuple(at[each] for each in wanted)
    missing = [name for name in ours if name not in place]
    which = f"{named(missing)} are not among the model's" if missing else "the model has two classes of one name"
    raise UserError(
        f"the classes of {source} do not fit the model's ({named(model)}): {which}; give --classes index if class 0, "
        "1, ... are the same in both"
    )


def open_set(request: EvalRequest, *, report: Callable[[str], None]) -> tuple[ShardSet, Store]:
    """Open the shards and their store; report damage."""
    from shardvit.data_shards.reading.opening import open_shards  # numpy would slow down --help
    from shardvit.data_shards.shards.shard_set import ShardsSpec
    from shardvit.data_shards.store.cache import CacheConfig
    from shardvit.data_shards.store.store import Store

    store = Store(CacheConfig(), commands="run")
    spec = ShardsSpec(
        request.shards,
        label=request.label,
        kind="multi" if request.multi_label else "single",
        classes=request.class_names,
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
    """Return truth and metrics for a model with these classes; UserError if they do not fit."""
    truth = find_truth(class_names, shards, label_set=request.labels, matching=request.classes, among=request.among)
    if request.labels == "real" and request.metrics is None:
        return truth, ("top5",)
    from shardvit.pipeline.recipe.stage_plan import chosen_metrics

    metrics = chosen_metrics(
        "auto" if request.metrics is None else request.metrics,
        label_kind=truth.label_kind,
        num_classes=len(truth.classes),
        flag="--metrics",
    )
    return truth, metrics
