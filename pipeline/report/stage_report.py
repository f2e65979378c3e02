"""A stage's tracker and progress bar, opened and closed together, on rank 0; silence on the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pipeline.context import StageContext
from pipeline.faults import FILE as FAULTS_FILE
from pipeline.ranks.stopping import Stopped
from pipeline.recipe.io import flatten
from pipeline.recipe.schema import StageName
from pipeline.recipe.stage_plan import StagePlan
from pipeline.report.metrics_log import open_metrics_log
from pipeline.report.mlflow_store import DatasetInput, Say, Tracker, TrackerSettings, open_tracker
from pipeline.report.progress import Progress
from pipeline.report.reporter import Recorder, Report, Silence
from pipeline.stage_data import StageData
from pipeline.state import TrainState

NOTHING_DONE = -1  # the tracker's word for a stage that starts from nothing: rows of every step are new


@contextmanager
def stage_report(
    context: StageContext, *, stage: StageName, data: StageData, plan: StagePlan, state: TrainState
) -> Iterator[Report]:
    """The report of one training stage; closed as finished, killed (`Stopped`) or failed."""
    if not context.ranks.place.is_main:
        yield Report(Silence(), samples_per_epoch=plan.samples_per_epoch, training_seconds=state.training_seconds)
        return
    datasets = tuple(
        DatasetInput(name=shards.name, source=shards.source, digest=shards.digest, context=use)
        for shards, use in ((data.train, "train"), (data.eval, "eval"))
    )
    log = open_metrics_log(context.folder.stage(stage) / "metrics.jsonl", resume_step=state.step or NOTHING_DONE)
    if log.dropped_broken_rows:
        print(f"{log.path}: {log.dropped_broken_rows} unreadable rows were dropped", file=sys.stderr)
    progress = Progress(
        stage, total_steps=plan.total_steps, start_step=state.step, images_per_step=plan.global_batch_images
    )
    with stage_tracker(
        context, stage=stage, datasets=datasets, resume_step=state.step or NOTHING_DONE, say=progress.note
    ) as tracker:
        recorder = Recorder(log=log, tracker=tracker, progress=progress)
        try:
            yield Report(recorder, samples_per_epoch=plan.samples_per_epoch, training_seconds=state.training_seconds)
        finally:
            progress.close()
            log.close()
            faults = context.folder.stage(stage) / FAULTS_FILE
            if faults.exists():
                tracker.log_artifact(faults)


@contextmanager
def stage_tracker(
    context: StageContext,
    *,
    stage: StageName,
    datasets: tuple[DatasetInput, ...],
    resume_step: int,
    say: Say | None = None,
) -> Iterator[Tracker]:
    """MLflow's run of one stage, below the pipeline's run; closed with what became of it."""
    recipe, folder = context.recipe, context.folder
    tracker = open_tracker(
        TrackerSettings(
            runs_root=folder.runs_root,
            run_dir=folder.path,
            pipeline=recipe.name,
            stage=stage,
            params=flatten(recipe),
            recipe_file=folder.path / "recipe.yaml",
            datasets=datasets,
            tags={"shardvit.world_size": str(context.ranks.place.world_size), **context.job_tags},
            resume_step=resume_step,
            tracking_uri=context.tracking.uri,
            experiment=context.tracking.experiment,
        ),
        say=say,
    )
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    except Stopped:
        status = "KILLED"
        raise
    finally:
        tracker.close(status, finish_parent=status != "FINISHED" or folder.is_complete(recipe))
