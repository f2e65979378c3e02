"""Run `shardvit transfer` after its flags are parsed: measure the model; save, show and track the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, get_args

from shardvit.data_shards.processes import num_cores
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import one_line, table
from shardvit.launch.flags import pixel_limit, tell_result
from shardvit.launch.local.env import experiment_name, tracking_uri
from shardvit.launch.local.output import say, say_model
from shardvit.pipeline.ranks.start_clock import StartClock
from shardvit.pipeline.recipe.data import ShardsConfig
from shardvit.pipeline.transfer.results import (
    Command,
    SetGroup,
    TransferRecord,
    TransferScore,
    metrics_of,
    model_origin,
    save_record,
)
from shardvit.pipeline.transfer.settings import TransferSet, open_set
from shardvit.pipeline.transfer.table import mean_score, measure_table, open_table, read_table, set_scores

if TYPE_CHECKING:
    from shardvit.launch.evaluation.transfer_options import TransferOptions
    from shardvit.pipeline.transfer.measure import SetMeasured
    from shardvit.pipeline.transfer.settings import Settings
    from shardvit.pipeline.using.predict import Predictor

_MOST_WORKERS = 16
_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class TransferOutcome:
    """A measurement, and where it is reported."""

    record: TransferRecord  # as saved in `file`
    file: Path
    shown: str  # a table
    params: dict[str, object]
    session: Session
    more: dict[str, object] = field(default_factory=dict)  # keys of the JSON


def measure_one_set(
    model: Path | Predictor, train_shards: str, eval_shards: str, settings: Settings, *, options: TransferOptions
) -> TransferOutcome:
    """Measure by one method on one data set."""
    store, classes = Store(CacheConfig()), str(options.classes) if options.classes else None
    opened = [
        open_set(ShardsConfig.model_construct(shards=each, label=options.label, classes=classes), store=store, say=say)
        for each in (train_shards, eval_shards)
    ]
    data = TransferSet(options.name or opened[1].name, *opened, store=store)
    with closing(StartClock(settings.method, say=say, part="importing libraries")) as clock:
        from shardvit.pipeline.transfer.measure import measure

        session = Session(model, command=settings.method, options=options, clock=clock)
        measured = measure(session.features, data, settings, most_images=options.images)
        _tell(measured)
        used, scores = measured.used, measured.scores
        record = replace(session.record(data.name), data_sets=(used,), results=scores)
        file = session.record_file(f"{record.name}-{used.digest}")
        save_record(file, record)
        damaged = f", {used.damaged_images:,} more could not be read" if used.damaged_images else ""
        spread = "; ±: standard deviation over the seeds" if any(len(each.values) > 1 for each in scores) else ""
        footer = (
            f"{used.eval_images:,} images of {used.num_classes:,} classes{damaged}; features: {record.layer}{spread}"
        )
        shots = {  # seed -> class -> its samples in TRAIN_SHARDS in drawing order: the first 5 are the 5 shots
            str(seed): {data.train.classes[label]: samples for label, samples in by_class.items()}
            for seed, by_class in measured.shots.items()
        }
        return TransferOutcome(
            record,
            file,
            shown=f"{table(_rows(measured), align='lr', heading='ruled')}\n{footer}",
            params={**settings.model_dump(mode="json"), "images": options.images},
            session=session,
            more={"shots": shots} if shots else {},
        )


def measure_a_table(model: Path | Predictor, source: Path, *, options: TransferOptions) -> TransferOutcome:
    """Measure all data sets of a table."""
    content = read_table(source)
    sets = open_table(content, store=Store(CacheConfig()), say=say)
    with closing(StartClock("transfer", say=say, part="importing libraries")) as clock:
        session = Session(model, command="transfer", options=options, clock=clock)
        name = (content.name or source.stem) + (f"-{options.images}" if options.images else "")

        def progress(number: int, data_set: str, measured: SetMeasured | None) -> None:
            if measured is not None:
                _tell(measured)
            say(f"{number} of {len(sets)}: {data_set} {'done' if measured is not None else 'done before'}")

        file = session.record_file(name)
        record = measure_table(
            content,
            sets,
            features=session.features,
            record=session.record(name),
            file=file,
            most_images=options.images,
            progress=progress,
        )
        params = {"table": str(source), "images": options.images, "method": content.method}
        shown = table(_table_rows(record), align="lr", heading="ruled")
        return TransferOutcome(record, file, shown=shown, params=params, session=session)


class Session:
    """One command on one model; `features` computes and caches its features."""

    def __init__(
        self, model: Path | Predictor, *, command: Command, options: TransferOptions, clock: StartClock
    ) -> None:
        from shardvit.pipeline.transfer.features import FeatureStore, default_features_folder
        from shardvit.pipeline.using.predict import open_predictor

        clock.set_status("loading the model")
        if isinstance(model, Path):
            predictor = open_predictor(model, device=options.device, weights=options.weights)
            say_model(model, origin=predictor.origin, notes=predictor.notes)
        else:
            predictor = model
        self.features = FeatureStore(
            predictor,
            layer=options.layer,
            folder=options.features,
            batch_images=options.batch_size,
            workers=options.workers or min(num_cores(), _MOST_WORKERS),
            pixel_limit=pixel_limit(options.max_image_pixels),
            say=say,
            clock=clock,
        )
        self._command: Command = command
        self._options, self._origin = options, model_origin(predictor.origin)
        self._outside = (options.features or default_features_folder()) / "results"

    def record(self, name: str) -> TransferRecord:
        origin = self._origin
        return TransferRecord(
            command=self._command,
            name=name,
            model=self.features.predictor.origin,
            model_digest=self.features.digest,
            layer=self.features.layer,
            run=origin.run and origin.run.name,
            stage=origin.stage,
            step=origin.step,
            images_seen=origin.images_seen,
        )

    def record_file(self, name: str) -> Path:
        """The result's file: in the run's folder or, for an outside model, next to the cached features."""
        digest = "" if self._origin.run else f"-{self.features.digest[:12]}"
        file = self._origin.record_file(f"{self._command}-{name}{digest}", outside=self._outside)
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        return file

    def log(self, record: TransferRecord, file: Path, *, params: dict[str, object]) -> None:
        """Make an MLflow run of the result."""
        from shardvit.pipeline.tracking.command_runs import CommandResult, log_result
        from shardvit.pipeline.tracking.facts import DatasetInput

        columns = ("data_set", "group", "method", "metric", "settings", "value")
        rows = [
            vars(each) | {"group": each.group or "", "settings": json.dumps(each.settings)} for each in record.results
        ]
        tracked = CommandResult(
            name=f"{record.command}-{record.run or Path(record.model).stem}-{record.name}",
            kind=record.command,
            params={"model": record.model, "layer": record.layer, "images_seen": record.images_seen, **params},
            metrics=metrics_of(record),
            datasets=[
                DatasetInput(name=f"{each.name}-{use}", source=source, digest=digest, context=use)
                for each in record.data_sets
                for use, source, digest in (
                    ("train", each.train, each.train_digest),
                    ("eval", each.eval, each.eval_digest),
                )
            ],
            files=[file],
            tables={"transfer": {name.replace("_", " "): [row[name] for row in rows] for name in columns}},
            of_run=self._origin.run,
        )
        log_result(tracked, tracking_uri=tracking_uri(), experiment=experiment_name(), say=say)


def tell(outcome: TransferOutcome, *, options: TransferOptions) -> int:
    """Print the table or JSON, and log the MLflow run; returns the exit code."""
    record, file = outcome.record, outcome.file
    as_json = json.dumps({**asdict(record), **outcome.more}, indent=1)
    tell_result(outcome.shown, as_json=as_json, json_file=options.json_file)
    say(f"the result is in {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
    if options.tracking:
        outcome.session.log(record, file, params=outcome.params)
    return 0


def _tell(measured: SetMeasured) -> None:
    for note in measured.notes:
        say(note)
    for fault in measured.faults[:_FAULTS_SHOWN]:
        say(f"{one_line(fault.key)} of {fault.shard} cannot be read and is left out: {fault.reason}")
    if (count := measured.used.damaged_images) > _FAULTS_SHOWN:
        say(f"{count:,} images in all cannot be read and are left out")


def _rows(measured: SetMeasured) -> list[tuple[str, ...]]:
    scores, settings = measured.scores, measured.scores[0].settings
    if scores[0].method == "fewshot":
        keys = ("shots", "images", "l2")
        rows: list[tuple[str, ...]] = [(*keys, "top-1", "±", "seeds")]
        for each in scores:
            given = (_numbers(each.settings[key]) for key in keys)
            rows.append((*given, f"{each.value:.4f}", _spread(each), str(each.settings["seeds"])))
        return rows
    names = list(dict.fromkeys(each.metric for each in scores))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for each in scores:
        found.setdefault(tuple(_numbers(each.settings[key]) for key in settings), {})[each.metric] = f"{each.value:.4f}"
    shown = {"top1": "top-1", "top5": "top-5"}
    images = f"{measured.used.train_images:,}"
    rows = [(*values, images, *(by_name[name] for name in names)) for values, by_name in found.items()]
    return [(*settings, "images", *(shown.get(name, name) for name in names)), *rows]


def _table_rows(record: TransferRecord) -> list[Sequence[str]]:
    scores = set_scores(record)
    rows: list[Sequence[str]] = [("data set", "classes", "train", "eval", "method", "top-1", "±")]
    for group in (*get_args(SetGroup), None):
        sets = [used for used in record.data_sets if used.group == group]
        for used in sets:
            score = scores[used.name]
            counts = (f"{each:,}" for each in (used.num_classes, used.train_images, used.eval_images))
            rows.append((used.name, *counts, _how(score), f"{score.value:.4f}", _spread(score)))
        if sets and group is not None:
            rows.append((f"mean of {group}", "", "", "", "", f"{mean_score(record, group=group):.4f}", ""))
    return [*rows, ("mean of all", "", "", "", "", f"{record.mean:.4f}", "")]


def _spread(score: TransferScore) -> str:
    return f"{stdev(score.values):.4f}" if len(score.values) > 1 else ""


def _numbers(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_numbers, dict.fromkeys(value)))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _how(score: TransferScore) -> str:
    match score.method:
        case "fewshot":
            return f"{score.settings['shots']}-shot"
        case "probe":
            return f"probe, C {_numbers(score.settings['c'])}"
        case "knn":
            return f"kNN, k {score.settings['k']}"
