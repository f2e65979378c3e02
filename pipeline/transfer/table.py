"""Measure a table of data sets for `shardvit transfer`: read YAML, measure set by set, save the result after each.

A set is measured again only if its settings, shards or model changed, so repeating an interrupted command resumes it.
Imports torch only to measure.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import one_line
from shardvit.pipeline.recipe.yaml_text import read_yaml_file
from shardvit.pipeline.transfer.results import TransferRecord, TransferScore, UsedSet, load_record, save_record
from shardvit.pipeline.transfer.settings import AnySet, Say, TransferSet, TransferTable, open_set

if TYPE_CHECKING:
    from shardvit.pipeline.transfer.features import FeatureStore
    from shardvit.pipeline.transfer.measure import SetMeasured

_METHODS = ("fewshot", "probe", "knn")


def read_table(path: Path) -> TransferTable:
    """Read a table; UserError names the wrong key or unreadable file."""
    tree = read_yaml_file(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} is no table: write method: probe, and data_sets: a list of {{name, train, eval}}")
    try:
        return TransferTable.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part not in _METHODS)
        if first["type"] == "extra_forbidden":
            raise UserError(one_line(f"{path}: unknown key {where}: leave it out")) from None
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(one_line(f"{path}: {f'{where}: ' if where else ''}{message}")) from None


def open_table(table: TransferTable, *, store: Store, say: Say) -> list[TransferSet]:
    """Open and check all sets before computing anything; UserError names the set."""
    opened: list[TransferSet] = []
    for each in table.data_sets:
        try:
            train, held_out = (open_set(shards, store=store, say=say) for shards in (each.train, each.eval))
            opened.append(TransferSet(each.name, train, held_out, store=store, group=each.group))
        except UserError as error:
            raise UserError(f"data set {each.name}: {error}") from None
    return opened


def measure_table(
    table: TransferTable,
    sets: Sequence[TransferSet],
    *,
    features: FeatureStore,
    record: TransferRecord,
    file: Path,
    most_images: int | None,
    progress: Callable[[int, str, SetMeasured | None], None],
) -> TransferRecord:
    """Measure what `file` lacks; `record` describes the model. After each set `progress` gets its number, name and
    result (None: kept from before). UserError as in `measure`; OSError if the disk is full."""
    from shardvit.pipeline.transfer.measure import measure

    found = _kept(file, like=record)
    for number, (settings, data) in enumerate(zip(table.data_sets, sets, strict=True), start=1):
        asked = _digest(settings, most_images=most_images)
        kept, measured = found.get(data.name), None
        if kept is None or not kept.is_of(data, asked=asked):
            try:
                measured = measure(features, data, settings, most_images=most_images)
            except UserError as error:
                raise UserError(f"data set {data.name}: {error}") from None
            found[data.name] = _Kept(measured.used, measured.scores, asked)
        is_last = number == len(sets)
        if is_last or measured is not None:  # keep earlier results of later sets, for a resume
            every = [found[each.name] for each in sets if each.name in found]
            record = replace(
                record,
                data_sets=tuple(each.used for each in every),
                results=tuple(score for each in every for score in each.scores),
                asked={each.used.name: each.asked for each in every},
            )
            record = replace(record, mean=mean_score(record)) if is_last else record
            save_record(file, record)
        progress(number, data.name, measured)
    return record


@dataclass(frozen=True)
class _Kept:
    """Result of one data set; `asked` digests how it was measured."""

    used: UsedSet
    scores: tuple[TransferScore, ...]
    asked: str

    def is_of(self, data: TransferSet, *, asked: str) -> bool:
        digests = (data.train.digest, data.eval.digest)
        return self.asked == asked and (self.used.train_digest, self.used.eval_digest) == digests


def _kept(file: Path, *, like: TransferRecord) -> dict[str, _Kept]:
    try:
        before = load_record(file)
    except ValueError:
        return {}
    if (before.command, before.model_digest, before.layer) != (like.command, like.model_digest, like.layer):
        return {}
    scores = defaultdict[str, list[TransferScore]](list)
    for each in before.results:
        scores[each.data_set].append(each)
    return {
        used.name: _Kept(used, tuple(scores[used.name]), before.asked[used.name])
        for used in before.data_sets
        if used.name in before.asked
    }


def _digest(settings: AnySet, *, most_images: int | None) -> str:
    asked = settings.model_dump(mode="json", exclude={"name", "train", "eval"}) | {"most_images": most_images}
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=8).hexdigest()


def set_scores(record: TransferRecord) -> dict[str, TransferScore]:
    """Each set's score in the mean: its first top-1."""
    found: dict[str, TransferScore] = {}
    for each in record.results:
        if each.metric == "top1":
            found.setdefault(each.data_set, each)
    return found


def mean_score(record: TransferRecord, *, group: str | None = None) -> float | None:
    """Mean over the data sets (of `group`, if given), as VTAB averages its 19."""
    values = [each.value for each in set_scores(record).values() if group is None or each.group == group]
    return statistics.fmean(values) if values else None
