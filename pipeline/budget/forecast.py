"""One stage's forecast, put together: its cost, its memory under each ZeRO stage, its time, traffic, disk and reading.

Assembly only; each number's reasons stand in the file that counts it. Evaluation, checkpoints, compiling and waiting
for data are not in the hours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.budget.communication import Job, Links, Traffic, most_useful_gpus, traffic
from pipeline.budget.cost import StageCost, stage_cost
from pipeline.budget.gpus import Gpu
from pipeline.budget.length import Length
from pipeline.budget.memory import MAX_LIVE_ELEMENTS, ZERO_STAGES, Activations, State, ZeroStage, state_of
from pipeline.budget.reading import Reading, reading
from pipeline.budget.speed import Speed, host_seconds, measured_speed, nearest_anchor, speed_at
from pipeline.checkpoint.disk_space import estimate_bytes
from pipeline.engine.zero_config import deepspeed_config
from pipeline.recipe.schema import Recipe, StageName, TrainStage
from pipeline.recipe.stage_plan import StagePlan

_ACTIVATIONS: tuple[Activations, ...] = ("all", "checkpointed")
_RECOMPUTED = 4 / 3  # of the arithmetic, with activation checkpointing


@dataclass(frozen=True)
class Machine:
    """What the run is planned for; `gpu` is None where it is not known."""

    gpus: int
    gpu: Gpu | None
    links: Links | None


@dataclass(frozen=True)
class Pace:
    """What the user says about the speed: nothing, an MFU, or images a second of one GPU in a stage of such FLOPs."""

    mfu: float | None = None
    images_per_second: float | None = None
    measured_flops: int | None = None
    measured_stage: StageName | None = None


@dataclass(frozen=True)
class Shards:
    """What is known of a stage's training shards; None: not known."""

    num_images: int | None
    num_classes: int
    image_bytes: float | None = None
    num_shards: int | None = None


@dataclass(frozen=True)
class MemoryRow:
    """One ZeRO stage on one GPU.

    Attributes:
        state: bytes apart from activations.
        peak_bytes: at the planned micro-batch, without and with activation checkpointing.
        largest_micro_batch: that fits, without and with it; None: the GPU is not known.
        traffic: of a step; None: the speed or the links are not known.
        step_seconds: of a step under this ZeRO stage; None: the speed is not known.
        kept_share: of one GPU's own speed, in such a step.
    """

    state: State
    peak_bytes: dict[Activations, int]
    largest_micro_batch: dict[Activations, int] | None
    traffic: Traffic | None
    step_seconds: float | None = None
    kept_share: float | None = None


@dataclass(frozen=True)
class Time:
    """How fast a stage goes; hours are None where its length is not known.

    Attributes:
        speed: of one GPU alone.
        step_seconds: of an optimizer step, with what it waits for others.
        host_seconds: that a processor needs to launch it, which is the least that it takes.
        kept_share: of the GPU's own speed, together with the others.
        images_per_second: of all GPUs.
        useful_gpus: of 1, 2, 4, ... the most that keep enough of their speed at this global batch.
        hours: of the stage.
        gpu_hours: of all GPUs together.
    """

    speed: Speed
    step_seconds: float
    host_seconds: float
    kept_share: float
    images_per_second: float
    useful_gpus: int
    hours: float | None
    gpu_hours: float | None


@dataclass(frozen=True)
class Disk:
    """Bytes of one checkpoint, and how many are there at the most, the one in the making included."""

    checkpoint_bytes: int
    most_checkpoints: int

    @property
    def num_bytes(self) -> int:
        return self.checkpoint_bytes * self.most_checkpoints


@dataclass(frozen=True)
class StageForecast:
    """What one training stage will need.

    Attributes:
        name: of the stage.
        config: the recipe's.
        cost: of one image.
        plan: the batches; where `problem` is not None only its sizes hold, as near as they can be.
        problem: why the stage cannot run like that on so many processes.
        total_images: None: the stage's length is not known.
        activations: whether the recipe checkpoints them.
        memory: by ZeRO stage.
        image_bytes: of activations of one image at the peak, without and with checkpointing.
        zero_stage: the recipe's.
        shards: what is known of them.
    """

    name: StageName
    config: TrainStage
    cost: StageCost
    plan: StagePlan
    problem: str | None
    total_images: int | None
    activations: Activations
    image_bytes: dict[Activations, int]
    memory: dict[ZeroStage, MemoryRow]
    zero_stage: ZeroStage
    shards: Shards
    disk: Disk
    time: Time | None
    reading: Reading | None

    @property
    def own(self) -> MemoryRow:
        """The row of the recipe's own ZeRO stage."""
        return self.memory[self.zero_stage]


def forecast_stage(
    recipe: Recipe, *, stage: StageName, length: Length, shards: Shards, machine: Machine, pace: Pace
) -> StageForecast:
    """Everything about one training stage."""
    config, engine, plan = recipe.train_stage(stage), recipe.engine, length.plan
    cost = stage_cost(recipe.model, stage=config, engine=engine, num_classes=shards.num_classes)
    finish = None  # of training with patch_dropout: all patches
    if config.patch_dropout and plan.patch_dropout_steps < plan.total_steps:
        whole = config.model_copy(update={"patch_dropout": 0.0})
        finish = stage_cost(recipe.model, stage=whole, engine=engine, num_classes=shards.num_classes)
    activations: Activations = "checkpointed" if engine.activation_checkpointing else "all"
    own: ZeroStage = engine.zero_stage if engine.backend == "deepspeed" else 0
    stages = ZERO_STAGES if engine.backend == "deepspeed" else (own,)
    speed = _speed(recipe, cost=cost, machine=machine, pace=pace)
    images: dict[Activations, int] = {kind: (finish or cost).image_bytes(kind) for kind in _ACTIVATIONS}
    memory: dict[ZeroStage, MemoryRow] = {
        zero_stage: _memory_row(
            recipe,
            config=config,
            cost=cost,
            plan=plan,
            zero_stage=zero_stage,
            images=images,
            machine=machine,
            speed=speed,
        )
        for zero_stage in stages
    }
    time = _time(
        recipe,
        config=config,
        cost=cost,
        finish=finish,
        length=length,
        machine=machine,
        speed=speed,
        row=memory[own],
    )
    return StageForecast(
        name=stage,
        config=config,
        cost=cost,
        plan=plan,
        problem=length.problem,
        total_images=plan.total_steps * plan.global_batch_images if length.known else None,
        activations=activations,
        image_bytes=images,
        memory=memory,
        zero_stage=own,
        shards=shards,
        disk=_disk(cost.parameters, recipe=recipe, config=config, plan=plan),
        time=time,
        reading=time and reading(time.images_per_second, image_bytes=shards.image_bytes, image_size=config.image_size),
    )


def _memory_row(
    recipe: Recipe,
    *,
    config: TrainStage,
    cost: StageCost,
    plan: StagePlan,
    zero_stage: ZeroStage,
    images: dict[Activations, int],
    machine: Machine,
    speed: Speed | None,
) -> MemoryRow:
    held = state_of(cost.parameters, engine=recipe.engine, optimizer=config.optimizer, plan=plan, zero_stage=zero_stage)
    sent: Traffic | None = None
    largest: dict[Activations, int] | None = None
    step_seconds = kept_share = None
    if speed:
        compute_seconds = _images_each(plan) / speed.images_per_second
        job = _job(recipe, cost=cost, config=config, plan=plan, zero_stage=zero_stage)
        if machine.links:
            sent = traffic(
                job,
                gpus=machine.gpus,
                links=machine.links,
                compute_seconds=compute_seconds,
                accumulation_steps=plan.accumulation_steps,
            )
        waited = sent.bare_seconds if sent else 0.0
        step_seconds = max(compute_seconds + waited, _host_seconds(cost, speed=speed, job=job, plan=plan))
        kept_share = compute_seconds / step_seconds
    if machine.gpu:
        usable = machine.gpu.usable_bytes
        largest = {kind: held.largest_micro_batch(usable, image_bytes=images[kind]) for kind in _ACTIVATIONS}
    peak: dict[Activations, int] = {
        kind: held.peak_bytes(plan.micro_batch_size * images[kind]) for kind in _ACTIVATIONS
    }
    return MemoryRow(held, peak, largest, sent, step_seconds, kept_share)


def _host_seconds(cost: StageCost, *, speed: Speed, job: Job, plan: StagePlan) -> float:
    """What a processor needs to launch a step; 0 where the speed is measured, which has it in it."""
    if speed.kind == "measured":
        return 0.0
    return host_seconds(cost.depth, zero_stage=job.zero_stage, passes=plan.accumulation_steps)


def _images_each(plan: StagePlan) -> int:
    """Of one GPU in one step."""
    return plan.micro_batch_size * plan.accumulation_steps


def _speed(recipe: Recipe, *, cost: StageCost, machine: Machine, pace: Pace) -> Speed | None:
    """Of one GPU alone; None: neither the GPU nor a measurement is known."""
    peak = machine.gpu.peak_flops(recipe.engine.precision) if machine.gpu else None
    if pace.images_per_second is not None:
        same = pace.measured_flops in (None, cost.training_flops)
        rate = pace.images_per_second * (
            1 if pace.measured_flops is None else pace.measured_flops / cost.training_flops
        )
        basis = "measured" if same else f"measured in {pace.measured_stage}, by FLOPs"
        return measured_speed(rate, training_flops=cost.training_flops, peak_flops=peak, basis=basis)
    if peak is None:
        return None
    if pace.mfu is not None:
        return speed_at(pace.mfu, training_flops=cost.training_flops, peak_flops=peak, basis="--mfu", given=True)
    mfu, basis = nearest_anchor(recipe.model, tokens=cost.tokens)
    if recipe.engine.activation_checkpointing:
        mfu, basis = mfu / _RECOMPUTED, f"{basis}, a quarter less for recomputing"
    return speed_at(mfu, training_flops=cost.training_flops, peak_flops=peak, basis=basis, given=False)


def _job(recipe: Recipe, *, cost: StageCost, config: TrainStage, plan: StagePlan, zero_stage: ZeroStage) -> Job:
    settings = deepspeed_config(recipe.engine, optimizer=config.optimizer, plan=plan)["zero_optimization"]
    ddp = recipe.engine.backend == "accelerate"  # which averages float32 gradients
    kind: Literal[0, 1, 2, 3, "ddp"] = "ddp" if ddp else zero_stage
    return Job(
        num_parameters=cost.parameters,
        weight_bytes=4 if ddp or recipe.engine.precision == "fp32" else 2,
        depth=cost.depth,
        zero_stage=kind,
        bucket_elements=settings["reduce_bucket_size"],
        gathers_again=cost.parameters > MAX_LIVE_ELEMENTS,
    )


def _time(
    recipe: Recipe,
    *,
    config: TrainStage,
    cost: StageCost,
    finish: StageCost | None,
    length: Length,
    machine: Machine,
    speed: Speed | None,
    row: MemoryRow,
) -> Time | None:
    """The time of a stage, whose steps are as `row` has them."""
    if speed is None or row.step_seconds is None or row.kept_share is None:
        return None
    plan = length.plan
    job = _job(recipe, cost=cost, config=config, plan=plan, zero_stage=recipe.engine.zero_stage)
    host = _host_seconds(cost, speed=speed, job=job, plan=plan)
    hours = gpu_hours = None
    if length.known:
        compute_seconds = _images_each(plan) / speed.images_per_second
        slower = finish.training_flops / cost.training_flops if finish else 1.0
        with_all = plan.total_steps - plan.patch_dropout_steps if finish else 0
        hours = (plan.total_steps * row.step_seconds + with_all * (slower - 1) * compute_seconds) / 3600
        gpu_hours = hours * machine.gpus
    useful = machine.gpus
    if machine.links:
        useful = most_useful_gpus(
            job,
            links=machine.links,
            global_batch_images=config.global_batch_size,
            images_per_second=speed.images_per_second,
            host_seconds=host if plan.accumulation_steps == 1 else 0.0,
        )
    return Time(
        speed=speed,
        step_seconds=row.step_seconds,
        host_seconds=host,
        kept_share=row.kept_share,
        images_per_second=plan.world_size * _images_each(plan) / row.step_seconds,
        useful_gpus=useful,
        hours=hours,
        gpu_hours=gpu_hours,
    )


def _disk(num_parameters: int, *, recipe: Recipe, config: TrainStage, plan: StagePlan) -> Disk:
    for_good = plan.total_steps // plan.keep_steps if plan.keep_steps else 0
    most = config.keep_checkpoints + for_good + (config.keep_best is not None) + 1
    return Disk(estimate_bytes(num_parameters, engine=recipe.engine, optimizer=config.optimizer.name), most)
