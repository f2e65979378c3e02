"""What the four commands share once their flags are read: model and features opened, result kept, shown and tracked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from data_shards.processes import num_cores
from data_shards.text import one_line, table
from launch.evaluation.options import TransferOptions
from launch.flags import pixel_limit
from launch.local.env import experiment_name, tracking_uri
from launch.local.output import say
from launch.target import tell_result
from pipeline.ranks.start_clock import StartClock
from pipeline.tracking.command_runs import CommandResult, log_result
from pipeline.tracking.facts import DatasetInput
from pipeline.transfer.features import FeatureReading, FeatureStore, default_features_folder
from pipeline.transfer.measure import SetMeasured
from pipeline.transfer.results import Command, TransferRecord, TransferScore, metrics_of, model_origin, save_record
from pipeline.using.predict import open_predictor

_MOST_WORKERS = 16
_FAULTS_SHOWN = 5


class Session:
    """One command on one model, whose features are in `features`."""

    def __init__(self, model: Path, *, command: Command, options: TransferOptions, clock: StartClock) -> None:
        clock.set_status("loading the model")
        predictor = open_predictor(model, device=options.device, weights=options.weights)
        self.features = FeatureStore(
            predictor,
            layer=options.layer,
            folder=options.features,
            reading=FeatureReading(
                batch_images=options.batch_size,
                workers=options.workers or min(num_cores(), _MOST_WORKERS),
                pixel_limit=pixel_limit(options.max_image_pixels),
            ),
            say=say,
            clock=clock,
        )
        if predictor.origin != str(model):
            say(f"the model is {predictor.origin}")
        for note in predictor.notes:
            say(f"note: {note}")
        self._command: Command = command
        self._options = options
        self._origin = model_origin(predictor.origin)

    def record(self, name: str) -> TransferRecord:
        """A result of this command, still without any number."""
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
        """Where the result is kept: in the run's folder or, for a model from elsewhere, beside the features."""
        outside = self._options.features or default_features_folder()
        stem = f"{self._command}-{name}"
        if self._origin.run is None:
            stem = f"{stem}-{self.features.digest[:12]}"
        return self._origin.record_file(stem, outside=outside / "results")

    def keep(self, record: TransferRecord) -> Path:
        """Write one of a single set to its file; OSError: the disk is full or fails."""
        file = self.record_file(f"{record.name}-{record.data_sets[0].digest}")
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        save_record(file, record)
        return file

    def finish(
        self,
        record: TransferRecord,
        file: Path,
        *,
        rows: Sequence[Sequence[str]],
        footer: Sequence[str],
        params: Mapping[str, object],
        more: Mapping[str, object] | None = None,
    ) -> int:
        """Print the table or JSON (with `more` keys), and make the MLflow run; returns the exit code."""
        text = json.dumps({**asdict(record), **(more or {})}, indent=1)
        shown = "\n".join([table(rows, align="lr", heading="ruled"), *footer])
        tell_result(shown, as_json=text, json_file=self._options.json_file)
        say(f"the result is in {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
        if self._options.tracking:
            self.features.clock.set_status("telling MLflow")
            self._log(record, file, params=params)
        return 0

    def _log(self, record: TransferRecord, file: Path, *, params: Mapping[str, object]) -> None:
        columns: dict[str, list[object]] = {
            "data set": [each.data_set for each in record.results],
            "group": [each.group or "" for each in record.results],
            "method": [each.method for each in record.results],
            "metric": [each.metric for each in record.results],
            "settings": [json.dumps(each.settings) for each in record.results],
            "value": [each.value for each in record.results],
        }
        about = {"model": record.model, "layer": record.layer, "images_seen": record.images_seen}
        result = CommandResult(
            name=f"{record.command}-{record.run or Path(record.model).stem}-{record.name}",
            kind=record.command,
            params={**about, **params},
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
            tables={"transfer": columns},
            of_run=self._origin.run,
        )
        log_result(result, tracking_uri=tracking_uri(), experiment=experiment_name(), say=say)


def tell(measured: SetMeasured) -> None:
    """Damaged images and notes, on standard error."""
    for note in measured.notes:
        say(note)
    for fault in measured.faults[:_FAULTS_SHOWN]:
        say(f"{one_line(fault.key)} of {fault.shard} cannot be read and is left out: {fault.reason}")
    if (count := measured.used.damaged_images) > _FAULTS_SHOWN:
        say(f"{count:,} images in all cannot be read and are left out")


def spread(score: TransferScore) -> str:
    """The standard deviation over the seeds; empty: there is one."""
    from statistics import stdev

    return f"{stdev(score.values):.4f}" if len(score.values) > 1 else ""
