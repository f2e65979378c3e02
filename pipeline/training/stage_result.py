"""End a training stage: write STAGE/model and the results in stage.json, and print the last lines."""

from __future__ import annotations

import math
from contextlib import nullcontext

from data_shards.durable import make_folders
from model.formats.export import save_for_others
from pipeline.checkpoint.train_state import TrainState
from pipeline.recipe.vocabulary import METRICS_FILE
from pipeline.report.best import best_results, describe_best
from pipeline.runs.logs import iter_metrics
from pipeline.runs.run_folder import weights_digest
from pipeline.stage.context import StageContext
from pipeline.stage.initial_model import StageStart, stage_model
from pipeline.stage.stage_data import Stage
from pipeline.training.after_step import TrainingFailed, TrainJob
from pipeline.training.assembly import judged_by


def write_result(context: StageContext, stage: Stage, *, job: TrainJob, state: TrainState, start: StageStart) -> None:
    """Write the model and mark the stage as done; collective. TrainingFailed: the last held-out loss is not finite."""
    config, name, model, report = stage.config, stage.name, stage.run.model(stage.name), job.report
    if not math.isfinite(loss := state.evaluation[config.judged_by("loss")]):
        raise TrainingFailed(
            f"the held-out loss after the last step, {state.step:,}, is {loss}; only the checkpoint is kept: lower "
            f"stages.{name}.optimizer.lr or lengthen its schedule.warmup, then use --restart {name}"
        )
    report.note(
        f"{name}: training stood still for its checkpoints for {job.saver.stall_seconds:.1f} s, "
        f"{job.saver.stall_seconds / report.attempt_seconds:.1%} of the time"
    )
    with job.engine.averaged() if config.ema and config.ema.model == "ema" else nullcontext():
        weights = job.engine.weights()
    if not context.ranks.place.is_main:
        return
    rows = iter_metrics(stage.folder / METRICS_FILE)
    best = best_results(rows, last=state.evaluation, by=judged_by(config, task=job.task))
    if best:
        report.note(f"{name}: {describe_best(best, stage=name, checkpoints=stage.checkpoints)}")
    make_folders(stage.folder, below=stage.run.path)  # fails if the run folder is gone
    meta = stage_model(stage.recipe, stage=name, classes=stage.data.train.classes, start=start)
    save_for_others(model, weights, meta=meta)
    stage.update(state="done", results={**state.evaluation, **best}, model_digest=weights_digest(model))
    context.draw(name, "end", state.step)
