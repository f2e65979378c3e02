"""`shardvit.load_run`: a run's folder as an object, through the reader of every other command. Nothing of the run is
executed; looking at records costs milliseconds, and only `model` and `predict` import torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.vocabulary import StageName, WeightsKind
from shardvit.pipeline.runs.read import Run, RunReader, run_folder_at
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord

if TYPE_CHECKING:
    import pandas

    from shardvit.launch.api.loaded_model import LoadedModel
    from shardvit.pipeline.recipe.schema import Recipe
    from shardvit.pipeline.runs.evaluations import Evaluation
    from shardvit.pipeline.using.predict import AnyImage, ImagePrediction


@dataclass(frozen=True)
class SavedEvaluation:
    """An evaluation of a stage on one held-out set: metrics, scores per class, confusion, calibration, mistakes."""

    stage: StageName
    step: int
    evaluation: Evaluation

    @property
    def metrics(self) -> Mapping[str, float]:
        """Named as in metrics.jsonl: `val/top1`, ..."""
        return self.evaluation.metrics


class LoadedRun:
    """A run on disk. Each look reads what is new, so that a run can be followed while it trains."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._reader = folder, RunReader(folder)

    def __repr__(self) -> str:
        states = ", ".join(f"{name}: {stage.state}" for name, stage in self.stages.items())
        return f"LoadedRun({str(self.path)!r}, {states})"

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self._folder.name

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe, a pydantic model; UserError if it cannot be read."""
        run = self._read("records")
        if run.recipe is None:
            raise UserError("; ".join(run.notes) or f"{self.path} has no recipe")
        return run.recipe

    @property
    def stages(self) -> dict[StageName, StageRecord]:
        """Each stage's record: `state` ("new", "running", "done"), `images_seen`, `last_saved_step`, `results`, ..."""
        return {stage.name: stage.record for stage in self._read("records").stages}

    @property
    def notes(self) -> tuple[str, ...]:
        """Parts of the run that could not be read, a sentence each."""
        return self._read("all").notes

    def metrics(self, stage: StageName | None = None) -> pandas.DataFrame:
        """Return every logged value, a row for each step: stage, step, images_seen, time (UTC), then the metrics.

        Args:
            stage: only this one's; None: all, in order.

        Returns:
            The frame; a metric that was not logged at a step is NaN there.

        Example:
            run.metrics("pretrain").plot(x="step", y="train/loss")
        """
        import pandas

        first = ("stage", "step", "images_seen", "time")
        rows: dict[tuple[str, int], dict[str, Any]] = {}  # a step that is logged and evaluated has two
        for each in self._read("all").stages:
            for row in each.rows if stage in (None, each.name) else ():
                values = dict(zip(first, (each.name, row.step, row.images_seen, row.time), strict=True))
                rows[each.name, row.step] = rows.get((each.name, row.step), {}) | values | dict(row.metrics)
        names = sorted({name for row in rows.values() for name in row} - {*first})
        frame = pandas.DataFrame([*rows.values()], columns=[*first, *names])
        return frame.assign(time=pandas.to_datetime(frame["time"], unit="s", utc=True))

    @property
    def evaluations(self) -> tuple[SavedEvaluation, ...]:
        """The newest two evaluations of each stage on each held-out set, oldest first. ValueError if one is damaged."""
        from shardvit.pipeline.runs.evaluations import evaluated_step, load_evaluation

        return tuple(
            SavedEvaluation(stage.name, evaluated_step(folder), load_evaluation(folder))
            for stage in self._read("records").stages
            for folders in stage.evaluations.values()
            for folder in folders
        )

    def model(
        self,
        stage: StageName | None = None,
        *,
        checkpoint: int | None = None,
        weights: WeightsKind | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ) -> LoadedModel:
        """Load a stage's model, in eval mode.

        Args:
            stage: None: the last finished training stage.
            checkpoint: the step of one of its checkpoints; None: the stage's result or, until it is done, the newest.
            weights: "weights" (as trained) or "ema" of a checkpoint that has both; None: the stage's choice.
            device: "auto": a GPU, if any.

        Returns:
            The model, with `transform`, `class_names` and `predict`.

        Raises:
            UserError: there is no such stage or checkpoint, or nothing is saved yet.

        Example:
            model = run.model("finetune")
        """
        from shardvit.launch.api.loaded_model import load_model

        return load_model(self.model_path(stage, checkpoint=checkpoint), weights=weights, device=device)

    def predict(self, images: Iterable[AnyImage] | AnyImage, *, top: int = 5) -> list[ImagePrediction]:
        """Classify images with the model of the last finished training stage.

        Args:
            images: paths (folders with all images below them), PIL images, arrays [H, W, 3] of uint8, or bytes.
            top: classes of each image.

        Returns:
            For each image its most probable `classes` (`name`, `index`, `probability`), best first, or a `fault`.

        Example:
            run.predict(["a.jpg", "b.jpg"])[0].classes[0].name
        """
        return self.model().predict(images, top=top)

    def model_path(self, stage: StageName | None = None, *, checkpoint: int | None = None) -> Path:
        """Return the path that `shardvit predict` takes for this model; UserError as `model`."""
        if stage is None and checkpoint is None:
            return self.path
        stages = self._read("records").stages
        wanted = [each for each in stages if each.name == stage or (stage is None and each.record.state == "done")]
        if not wanted:
            what = "finished stage" if stage is None else f"stage {stage}"
            raise UserError(f"{self.path} has no {what}: it has {', '.join(each.name for each in stages) or 'none'}")
        if checkpoint is None:
            return wanted[-1].folder
        found = {int(path.name.rpartition("-")[2]): path for path in wanted[-1].checkpoints}
        if checkpoint not in found:
            steps = ", ".join(map(str, sorted(found))) or "none"
            raise UserError(f"{wanted[-1].folder} has no checkpoint of step {checkpoint}: it has {steps}")
        return found[checkpoint]

    def _read(self, parts: Literal["all", "records"]) -> Run:
        return self._reader.read(parts=parts)


def load_run(path: str | os.PathLike[str], *, trust: str | os.PathLike[str] | None = None) -> LoadedRun:
    """Open a run's folder, also of a run that is still training, or of somebody else's: nothing of it is executed.

    Args:
        path: RUNS/NAME.
        trust: the Python file of the run's own model, which `model` and `predict` then execute.

    Returns:
        The run.

    Raises:
        UserError: there is no run, or no file to trust.

    Example:
        run = shardvit.load_run("runs/digits")
    """
    if trust is not None:
        from shardvit.pipeline.own_code.by_path import trust_file

        trust_file(Path(trust))
    return LoadedRun(run_folder_at(Path(path)))
