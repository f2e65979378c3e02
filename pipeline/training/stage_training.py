"""Run one training stage, from its initial model to its result. `stages` has the differences between stages."""

from contextlib import closing
from dataclasses import replace

from torch import nn

from shardvit.model.vit import checkpoint_blocks
from shardvit.pipeline.checkpoint.store import Restored
from shardvit.pipeline.checkpoint.train_state import RollBack, TrainState
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.kernels.settle import Kernels, settled_kernels
from shardvit.pipeline.ranks.watch import Watch
from shardvit.pipeline.report.reporter import stage_report
from shardvit.pipeline.runs.run_folder import check_inputs
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.data_record import check_data, keep_data
from shardvit.pipeline.stage.initial_model import StageStart, stage_model
from shardvit.pipeline.stage.stage_data import Stage
from shardvit.pipeline.stage.start_summary import describe_start
from shardvit.pipeline.tasks.distillation import prepare_student
from shardvit.pipeline.tasks.make_task import make_task, task_outputs
from shardvit.pipeline.training.assembly import check_disk, make_job, make_phases, write_result
from shardvit.pipeline.training.rollback import record_rollback, restore
from shardvit.pipeline.training.train_loop import train
from shardvit.pipeline.using.teacher import Teacher, load_teacher


def train_stage(context: StageContext, stage: Stage, *, model: nn.Module, start: StageStart) -> None:
    """Train `model` to the end of the stage, from its last checkpoint if any, and write STAGE/model; collective.
    UserError if an input or checkpoint is not the one the stage started with; Stopped by a signal, after saving."""
    recipe, plan = stage.recipe, stage.plan
    outputs = task_outputs(stage.config, classes=stage.data.train.classes)
    inputs, record = {**stage.inputs, "weights": start.weights}, stage.record
    teacher = None
    if stage.config.distillation is not None:
        context.start.set_status("reading the teacher")
        teacher = load_teacher(recipe, stage=stage.name, classes=outputs)
        inputs["teacher"] = teacher.digest
        prepare_student(model, teacher, seed=recipe.seed)
    data_record = context.on_main(lambda: check_data(stage.run, stage=stage.name, data=stage.data))
    for note in data_record.notes if data_record else ():
        context.say(note)
    check_inputs(stage.run, stage=stage.name, inputs=inputs)
    with (
        context.watch(stage.name) as watch,
        settled_kernels(recipe, stage=stage.name, model=model, run=stage.run.path) as kernels,
    ):
        _set_status(context, watch, "opening the engine")
        if recipe.model.custom is None:
            checkpoint_blocks(model, every=recipe.engine.checkpointed_every)
        if record.last_saved_step < plan.total_steps:
            context.on_main(lambda: check_disk(stage, model=model))
        engine = open_engine(recipe, stage=stage.name, plan=plan, model=model, ranks=context.ranks)
        while True:
            _set_status(context, watch, "restoring a checkpoint")
            restored, state = restore(context, stage, engine=engine)
            if data_record:
                keep_data(stage.run, data_record, stage=stage.name)
                stage.update(
                    state="running",
                    inputs=inputs,
                    data_digest=data_record.digest,
                    total_steps=plan.total_steps,
                    lanes=plan.lanes,
                    model=stage_model(recipe, stage=stage.name, classes=outputs, start=start).model_dump(
                        mode="json", exclude_none=True
                    ),
                )
            try:
                _attempt(
                    context,
                    stage,
                    start=start,
                    engine=engine,
                    teacher=teacher,
                    kernels=kernels,
                    watch=watch,
                    resumed=(restored, state),
                )
                engine.close()
                return
            except RollBack as back:
                record_rollback(context, stage, back.trouble)


def _attempt(
    context: StageContext,
    stage: Stage,
    *,
    start: StageStart,
    engine: Engine,
    teacher: Teacher | None,
    kernels: Kernels,
    watch: Watch,
    resumed: tuple[Restored | None, TrainState],
) -> None:
    (restored, state), name, place = resumed, stage.name, context.ranks.place
    phases = make_phases(context, stage.recipe.engine, watch=watch, device=engine.device)
    context.start.set_status("preparing data and records")
    with stage_report(
        context,
        stage=name,
        data=stage.data,
        plan=stage.plan,
        state=state,
        phases=phases,
        tags=kernels.tags,
        teacher_flops=teacher.facts.forward_flops if teacher else 0,
    ) as report:
        if context.start.say is not None:
            context.start.say = report.note  # does not garble a progress bar
        if kernels.compiled:
            kernels.compiled.tell = lambda line: report.note(f"{name}: {line}")
        task = make_task(
            stage.recipe,
            stage=name,
            data=stage.data,
            normalisation=start.normalisation,
            engine=engine,
            teacher=teacher,
        )
        job = make_job(context, stage, task=task, engine=engine, state=state, watch=watch, report=report)
        if place.is_main:
            for line in describe_start(stage, place=place, task=task, notes=kernels.notes, restored=restored):
                report.note(line)
            for line in start.notes if restored is None else ():
                report.note(f"{name}: {line}")
            context.draw(name, "begin", state.step)
        with closing(job.batches), closing(job.saver):
            if stage.plan.rollback and restored is None:
                job.saver.save(state)  # to roll back to, should trouble come before the next save
            if start.notes and restored is None:
                job = replace(job, evaluates_first=True)
            state = train(job, state)
        watch.progress(state.step, status="writing the model")
        write_result(context, stage, job=job, state=state, start=start)


def _set_status(context: StageContext, watch: Watch, status: str) -> None:
    watch.progress(0, status=status)
    context.start.set_status(status)
