"""A table of data sets for `shardvit transfer`: read from YAML, measured set by set, its result kept after each.

A set whose settings, shards and model are those of the kept result is not measured again, so that the same command,
typed again after an interruption, goes on. No torch, until something is measured.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from data_shards.errors import UserError
from data_shards.store.store import Store
from data_shards.text import one_line
from pipeline.recipe.yaml_text import read_yaml_file
from pipeline.transfer.data_sets import Say, TransferSet, check_sets, open_set
from pipeline.transfer.results import TransferRecord, TransferScore, UsedSet, load_record, save_record
from pipeline.transfer.settings import AnySet, Settings, TransferTable

if TYPE_CHECKING:
    from pipeline.transfer.features import FeatureStore
    from pipeline.transfer.measure import SetMeasured

_METHODS = ("fewshot", "probe", "knn")


def read_table(path: Path) -> TransferTable:
    """UserError: it cannot be read, or a key is wrong; the sentence names it."""
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
    """Open and check all sets before anything is computed. UserError names the set."""
    opened: list[TransferSet] = []
    for each in table.data_sets:
        try:
            train, held_out = (open_set(shards, store=store, say=say) for shards in (each.train, each.eval))
            data = TransferSet(each.name, train, held_out, store=store, group=each.group)
            check_sets(data)
        except UserError as error:
            raise UserError(f"data set {each.name}: {error}") from None
        opened.append(data)
    return opened


def settings_of(data: AnySet) -> Settings:
    """Measuring settings of a table's set."""
    for kind in type(data).__mro__:
        if kind in Settings.__args__:
            return kind.model_validate({name: getattr(data, name) for name in kind.model_fields})
    raise AssertionError(type(data))


@dataclass(frozen=True)
class TableProgress:
    """Progress of `measure_table` after one set."""

    number: int
    of: int
    name: str
    measured: SetMeasured | None  # None: it was kept from before


def measure_table(
    table: TransferTable,
    sets: Sequence[TransferSet],
    *,
    features: FeatureStore,
    record: TransferRecord,
    file: Path,
    most_images: int | None,
    told: Callable[[TableProgress], None],
) -> TransferRecord:
    """Measure what `file` does not have; `record`: what it will say of the model. UserError as `measure`; OSError: the
    disk is full or fails."""
    from pipeline.transfer.measure import measure

    before = _kept(file, like=record)
    for number, (config, data) in enumerate(zip(table.data_sets, sets, strict=True), start=1):
        settings = settings_of(config)
        asked = _digest({**settings.model_dump(mode="json"), "most_images": most_images, "group": config.group})
        kept, measured = _same(before, data, asked=asked), None
        if kept is None:
            try:
                measured = measure(features, data, settings, most_images=most_images)
            except UserError as error:
                raise UserError(f"data set {data.name}: {error}") from None
            kept = measured.used, measured.scores
        record = _added(record, *kept, asked=asked)
        if number == len(sets):
            record = replace(record, mean=mean_score(record))
            save_record(file, record)
        elif measured is not None:
            done = {each.name for each in sets[:number]}
            save_record(file, _added_rest(record, before, names=[each.name for each in sets if each.name not in done]))
        told(TableProgress(number, len(sets), data.name, measured))
    return record


def _kept(file: Path, *, like: TransferRecord) -> TransferRecord | None:
    """The result that is there already, if it is of the same model."""
    try:
        before = load_record(file)
    except ValueError:
        return None
    same = (before.command, before.model_digest, before.layer) == (like.command, like.model_digest, like.layer)
    return before if same else None


def _same(
    before: TransferRecord | None, data: TransferSet, *, asked: str
) -> tuple[UsedSet, tuple[TransferScore, ...]] | None:
    """Earlier scores of the same shards and settings."""
    if before is None or before.asked.get(data.name) != asked:
        return None
    for used in before.data_sets:
        if (used.name, used.train_digest, used.eval_digest) == (data.name, data.train.digest, data.eval.digest):
            return used, tuple(each for each in before.results if each.data_set == data.name)
    return None


def _added(record: TransferRecord, used: UsedSet, scores: tuple[TransferScore, ...], *, asked: str) -> TransferRecord:
    return replace(
        record,
        data_sets=(*record.data_sets, used),
        results=(*record.results, *scores),
        asked={**record.asked, used.name: asked},
    )


def _added_rest(record: TransferRecord, before: TransferRecord | None, *, names: Sequence[str]) -> TransferRecord:
    """Add earlier results of sets still to come, so that an interruption does not lose them."""
    for used in before.data_sets if before else ():
        if before and used.name in names and used.name in before.asked:
            scores = tuple(each for each in before.results if each.data_set == used.name)
            record = _added(record, used, scores, asked=before.asked[used.name])
    return record


def _digest(asked: dict[str, object]) -> str:
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=8).hexdigest()


def set_scores(record: TransferRecord) -> dict[str, TransferScore]:
    """Each set's score in the mean: its first top-1."""
    found: dict[str, TransferScore] = {}
    for each in record.results:
        if each.metric == "top1":
            found.setdefault(each.data_set, each)
    return found


def mean_score(record: TransferRecord, *, group: str | None = None) -> float | None:
    """Over the data sets, as VTAB's score is over its 19; of one group, or of all. None: there is none."""
    values = [each.value for each in set_scores(record).values() if group is None or each.group == group]
    return statistics.fmean(values) if values else None
