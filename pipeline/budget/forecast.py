"""Assemble the forecast of a stage: cost, memory under each ZeRO stage, time, traffic, disk and reading.

Hours exclude evaluation, checkpoints, compiling and waiting for data. `shardvit plan --json` prints these fields.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardvit.data_shards.images.size_phases import size_at
from shardvit.pipeline.budget.communication import Links, Traffic, Way, Workload, ZeroKind, most_useful_gpus, traffic
from shardvit.pipeline.budget.cost import StageCost, phase_costs, stage_cost
from shardvit.pipeline.budget.gpus import Gpu
from shardvit.pipeline.budget.length import Length
from shardvit.pipeline.budget.memory import (
    MAX_LIVE_ELEMENTS,
    ZERO_STAGES,
    Activations,
    Saving,
    State,
    ZeroStage,
    copied_bytes,
    saving,
    state_of,
)
from shardvit.pipeline.budget.speed import (
    Reading,
    ReadingAhead,
    Speed,
    host_seconds,
    nearest_anchor,
    reading,
    reading_ahead,
)
from shardvit.pipeline.checkpoint.disk_space import estimate_bytes
from shardvit.pipeline.engine.zero_config import bucket_elements, least_piece_elements, overlaps, takes_flat_step
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import OPTIMIZERS, StageName

_ACTIVATIONS: tuple[Activations, ...] = ("all", "checkpointed")
_FORWARD = 1 / 3  # of the FLOPs: recomputed if all blocks are checkpointed


@dataclass(frozen=True)
class Hardware:
    """Hardware to plan for; None: unknown."""

    gpus: int
    gpu: Gpu | None
    links: Links | None


@dataclass(frozen=True)
class GivenSpeed:
    """Speed given by the user: none, an MFU, or one GPU's images/s in `measured_stage`, `measured_flops` per image."""

    mfu: float | None = None
    images_per_second: float | None = None
    measured_flops: int | None = None
    measured_stage: StageName | None = None


@dataclass(frozen=True)
class Shards:
    """A stage's training shards; None: unknown."""

    num_images: int | None
    num_classes: int
    image_bytes: float | None = None
    num_shards: int | None = None


@dataclass(frozen=True)
class TeacherCost:
    """A teacher on each GPU, whole; the memory of its forward pass, which keeps nothing, is not counted."""

    num_bytes: int
    forward_flops: int  # per image


@dataclass(frozen=True)
class MemoryRow:
    """One ZeRO stage on one GPU; dicts: without and with activation checkpointing."""

    state: State  # bytes apart from activations
    peak_bytes: dict[Activations, int]  # at the planned micro-batch
    largest_micro_batch: dict[Activations, int] | None  # that fits; None: GPU unknown
    traffic: Traffic | None  # of a step; None: speed or links unknown
    step_seconds: float | None = None  # None, as the next: speed unknown
    kept_share: float | None = None  # share of the speed of a lone GPU


@dataclass(frozen=True)
class Time:
    """Speed of a stage; hours are None if its length is unknown."""

    speed: Speed  # of one GPU alone
    step_seconds: float  # of an optimizer step, including waiting for other GPUs
    host_seconds: float  # CPU time to launch it: a lower bound
    host_bound_images: int  # fewer images per pass are CPU-bound; 0: the speed was measured
    kept_share: float  # share of the speed of a lone GPU
    images_per_second: float  # of all GPUs
    useful_gpus: int  # most of 1, 2, 4, ... that pay off at this global batch
    hours: float | None
    gpu_hours: float | None


@dataclass(frozen=True)
class PhaseForecast:
    """Steps of equal cost: images grow in phases, and patch dropout may end before the stage."""

    steps: int
    image_size: int
    training_flops: int  # of one image
    step_seconds: float | None  # None: speed unknown


@dataclass(frozen=True)
class CheckpointSpace:
    """Bytes of one checkpoint, and the most that exist at once, including the one being written."""

    checkpoint_bytes: int
    most_checkpoints: int

    @property
    def num_bytes(self) -> int:
        return self.checkpoint_bytes * self.most_checkpoints


@dataclass(frozen=True)
class StageForecast:
    """Forecast of one training stage; with `phases`, cost and speed of its last size."""

    name: StageName
    config: TrainStage
    cost: StageCost  # of one image
    plan: StagePlan  # with a `problem`: the nearest sizes
    problem: str | None  # why the stage cannot run on this many processes
    total_images: int | None  # None: length unknown
    phases: tuple[PhaseForecast, ...]  # of images that grow; (): they do not
    activations: Activations  # as in the recipe
    image_bytes: dict[Activations, int]  # activations of one image at the peak
    memory: dict[ZeroStage, MemoryRow]
    zero_stage: ZeroStage  # the recipe's
    shards: Shards
    disk: CheckpointSpace
    saving: Saving | None  # in the background; None: saves block
    time: Time | None  # None, as the next two: speed unknown
    reading: Reading | None
    ahead: ReadingAhead | None
    teacher: TeacherCost | None = None

    @property
    def own(self) -> MemoryRow:
        return self.memory[self.zero_stage]


def forecast_stage(
    recipe: Recipe,
    *,
    stage: StageName,
    length: Length,
    shards: Shards,
    machine: Hardware,
    given: GivenSpeed,
    teacher: TeacherCost | None = None,
) -> StageForecast:
    """Forecast one training stage; `teacher` of `distill`."""
    config, engine, plan = recipe.train_stage(stage), recipe.engine, length.plan
    cost = stage_cost(recipe.model, stage=config, engine=engine, num_classes=shards.num_classes)
    costs = phase_costs(recipe, stage=stage, plan=plan, num_classes=shards.num_classes)
    if teacher:
        cost, *later = (
            replace(each, training_flops=each.training_flops + teacher.forward_flops)
            for each in (cost, *costs.values())
        )
        costs = dict(zip(costs, later, strict=True))
    own: ZeroStage = engine.zero_stage if engine.backend == "deepspeed" else 0
    takes = OPTIMIZERS[config.optimizer.name].takes if engine.backend == "deepspeed" else "parameters"
    images: dict[Activations, int] = {
        kind: max(each.image_bytes(kind) for each in costs.values()) for kind in _ACTIVATIONS
    }
    part = _Part(recipe, config, plan, cost, machine, _speed(recipe, cost=cost, machine=machine, given=given))
    ours: tuple[ZeroStage, ...] = (0, 1, 2) if engine.precision != "fp16" and engine.offload == "none" else (own,)
    stages: tuple[ZeroStage, ...] = {"pieces": ZERO_STAGES, "split": ours, "parameters": (own,)}[takes]
    weights = teacher.num_bytes if teacher else 0
    memory: dict[ZeroStage, MemoryRow] = {each: part.row(each, images=images, teacher_bytes=weights) for each in stages}
    phases = part.phases(memory[own], zero_stage=own, costs=costs)
    time = part.time(memory[own], zero_stage=own, phases=phases, known=length.known)
    read = ahead = None
    if time:
        fastest, rate = config.image_size, time.images_per_second
        if plan.size_phases:  # the smallest images are the fastest
            fastest, rate = recipe.image_sizes(stage)[0], plan.global_batch_images / (phases[0].step_seconds or 1.0)
        read = reading(rate, image_bytes=shards.image_bytes, image_size=fastest)
        ahead = reading_ahead(
            recipe,
            image_size=config.image_size,
            micro_batch=plan.micro_batch_size,
            decode_seconds=read.decode_ms / 1000,
            speed=time.speed.images_per_second * rate / time.images_per_second,
        )
    forever = plan.total_steps // plan.keep_steps if plan.keep_steps else 0
    return StageForecast(
        name=stage,
        config=config,
        cost=cost,
        plan=plan,
        problem=length.problem,
        total_images=plan.total_steps * plan.global_batch_images if length.known else None,
        phases=phases if plan.size_phases else (),
        activations="checkpointed" if engine.checkpointed_every else "all",
        image_bytes=images,
        memory=memory,
        zero_stage=own,
        shards=shards,
        disk=CheckpointSpace(
            estimate_bytes(cost.parameters, engine=engine, optimizer=config.optimizer, ema=config.ema),
            max(config.keep_checkpoints, plan.most_within_reach) + forever + (config.keep_best is not None) + 1,
        ),
        saving=part.saving(own),
        teacher=teacher,
        time=time,
        reading=read,
        ahead=ahead,
    )


@dataclass(frozen=True)
class _Part:
    recipe: Recipe
    config: TrainStage
    plan: StagePlan
    cost: StageCost
    machine: Hardware
    speed: Speed | None

    @property
    def compute_seconds(self) -> float | None:
        """Compute time of a step on one GPU."""
        images = self.plan.micro_batch_size * self.plan.accumulation_steps
        return images / self.speed.images_per_second if self.speed else None

    def row(self, zero_stage: ZeroStage, *, images: dict[Activations, int], teacher_bytes: int = 0) -> MemoryRow:
        """`images`: activation bytes of one image."""
        plan, config, machine, compute_seconds = self.plan, self.config, self.machine, self.compute_seconds
        held = state_of(
            self.cost.parameters,
            engine=self.recipe.engine,
            optimizer=config.optimizer,
            plan=plan,
            zero_stage=zero_stage,
            ema=config.ema,
        )
        held = replace(held, weights=held.weights + teacher_bytes)
        largest: dict[Activations, int] | None = None
        sent = step_seconds = kept_share = None
        if compute_seconds is not None:
            if machine.links:
                sent = traffic(
                    self.workload(zero_stage),
                    gpus=machine.gpus,
                    links=machine.links,
                    compute_seconds=compute_seconds,
                    accumulation_steps=plan.accumulation_steps,
                )
            step_seconds = max(compute_seconds + (sent.bare_seconds if sent else 0.0), self.host_seconds(zero_stage))
            kept_share = compute_seconds / step_seconds
        if machine.gpu:
            usable = machine.gpu.usable_bytes
            largest = {kind: held.largest_micro_batch(usable, image_bytes=images[kind]) for kind in _ACTIVATIONS}
        peak: dict[Activations, int] = {
            kind: held.peak_bytes(plan.micro_batch_size * images[kind]) for kind in _ACTIVATIONS
        }
        return MemoryRow(held, peak, largest, sent, step_seconds, kept_share)

    def phases(
        self, row: MemoryRow, *, zero_stage: ZeroStage, costs: Mapping[int, StageCost]
    ) -> tuple[PhaseForecast, ...]:
        """`costs`: by first step; all phases at the MFU of the last size."""
        found: list[PhaseForecast] = []
        for first, after in pairwise([*costs, self.plan.total_steps]):
            flops, seconds = costs[first].training_flops, None
            if row.step_seconds is not None and self.compute_seconds is not None:
                more = flops / self.cost.training_flops - 1
                seconds = max(row.step_seconds + more * self.compute_seconds, self.host_seconds(zero_stage))
            size = size_at(self.plan.size_phases, step=first) or self.config.image_size
            found.append(PhaseForecast(after - first, size, flops, seconds))
        return tuple(found)

    def time(
        self, row: MemoryRow, *, zero_stage: ZeroStage, phases: Sequence[PhaseForecast], known: bool
    ) -> Time | None:
        """`known`: whether the number of steps is known."""
        plan, machine, speed, compute_seconds = self.plan, self.machine, self.speed, self.compute_seconds
        if speed is None or compute_seconds is None or row.step_seconds is None or row.kept_share is None:
            return None
        host, hours = self.host_seconds(zero_stage), None
        if known:
            hours = sum(each.steps * (each.step_seconds or 0.0) for each in phases) / 3600
        useful = machine.gpus
        if machine.links:
            useful = most_useful_gpus(
                self.workload(zero_stage),
                links=machine.links,
                global_batch_images=self.config.global_batch_size,
                images_per_second=speed.images_per_second,
                host_seconds=host if plan.accumulation_steps == 1 else 0.0,
            )
        return Time(
            speed=speed,
            step_seconds=row.step_seconds,
            host_seconds=host,
            host_bound_images=math.ceil(host * speed.images_per_second / plan.accumulation_steps),
            kept_share=row.kept_share,
            images_per_second=plan.global_batch_images / row.step_seconds,
            useful_gpus=useful,
            hours=hours,
            gpu_hours=None if hours is None else hours * machine.gpus,
        )

    def saving(self, zero_stage: ZeroStage) -> Saving | None:
        engine, machine = self.recipe.engine, self.machine
        copied = copied_bytes(
            self.cost.parameters,
            engine=engine,
            optimizer=self.config.optimizer,
            ema=self.config.ema,
            zero_stage=zero_stage,
            processes=self.plan.world_size,
        )
        local = min(machine.gpus, machine.links.gpus_per_node) if machine.links else None
        return saving(copied, engine=engine, gpu=machine.gpu, local_processes=local, pass_seconds=self.compute_seconds)

    def host_seconds(self, zero_stage: ZeroStage) -> float:
        """CPU time to launch a step; 0 if the speed was measured, which includes it."""
        if self.speed and self.speed.kind == "measured":
            return 0.0
        return host_seconds(self.cost.depth, zero_stage=self.kind(zero_stage), passes=self.plan.accumulation_steps)

    def kind(self, zero_stage: ZeroStage) -> ZeroKind:
        return "ddp" if self.recipe.engine.backend == "accelerate" or zero_stage == 0 else zero_stage

    def workload(self, zero_stage: ZeroStage) -> Workload:
        kind, engine = self.kind(zero_stage), self.recipe.engine
        several = max(2, self.plan.world_size)
        way: Way = "overlapped"
        engine = engine.model_copy(update={"zero_stage": zero_stage})
        if kind != "ddp" and not overlaps(engine, world_size=several):
            way = "at once" if takes_flat_step(engine) else "in turn"
        return Workload(
            num_parameters=self.cost.parameters,
            weight_bytes=4 if engine.backend == "accelerate" or engine.precision == "fp32" else 2,
            depth=self.cost.depth,
            zero_stage=kind,
            bucket_elements=bucket_elements(engine, world_size=1),
            gathers_again=self.cost.parameters > MAX_LIVE_ELEMENTS,
            way=way,
            reduction="scatter" if takes_flat_step(engine) else "all-reduce",
            least_piece_elements=least_piece_elements(engine),
            hides_gathers=self.recipe.model.kind == "vit",
        )


def _speed(recipe: Recipe, *, cost: StageCost, machine: Hardware, given: GivenSpeed) -> Speed | None:
    peak = machine.gpu.peak_flops(recipe.engine.precision) if machine.gpu else None
    flops = cost.training_flops
    if given.images_per_second is not None:
        measured_flops = given.measured_flops or flops
        basis = "measured" if measured_flops == flops else f"measured in {given.measured_stage}, by FLOPs"
        rate = given.images_per_second * (measured_flops / flops)
        return Speed(rate, rate * flops / peak if peak else None, basis, "measured")
    if peak is None:
        return None
    if given.mfu is not None:
        return Speed(given.mfu * peak / flops, given.mfu, "--mfu", "given")
    mfu, basis = nearest_anchor(recipe.model, tokens=cost.tokens)
    if every := recipe.engine.checkpointed_every:
        more = _FORWARD * -(-cost.depth // every) / cost.depth
        mfu, basis = mfu / (1 + more), f"{basis}, {more / (1 + more):.0%} less for recomputing"
    return Speed(mfu * peak / flops, mfu, basis, "anchor")
