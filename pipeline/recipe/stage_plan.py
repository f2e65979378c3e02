"""Derive a stage's batches, steps and epochs at a world size; runs before launch and again on every rank. No GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.size_phases import SizePhase
from shardvit.data_shards.order.repeats import check_repeats
from shardvit.data_shards.order.sample_order import check_sizes, check_world_size
from shardvit.data_shards.text import counted
from shardvit.data_shards.vocabulary import LabelKind
from shardvit.pipeline.recipe.data import FewShotConfig
from shardvit.pipeline.recipe.duration import in_steps, parse_duration
from shardvit.pipeline.recipe.optimizer import Schedule
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.image_growth import growth_of
from shardvit.pipeline.recipe.stages.train_stage import RollbackConfig, TrainStage
from shardvit.pipeline.recipe.vocabulary import OF_ONE_LABEL, OF_SEVERAL_LABELS, EvalMetric, StageName


@dataclass(frozen=True)
class StagePlan:
    """Numbers derived from recipe, shards and world size."""

    world_size: int
    global_batch_images: int
    micro_batch_size: int  # images per process in a forward pass
    accumulation_steps: int  # forward passes per process in an optimizer step
    lanes: int
    total_steps: int
    samples_per_epoch: int
    schedule: Schedule
    log_steps: int = 0  # interval in steps, as the next three; 0: never
    eval_steps: int = 0
    save_steps: int = 0
    keep_steps: int = 0  # checkpoints that are never pruned
    save_after_evaluations: bool = False
    patch_dropout: float = 0.0  # share of patches dropped in the first `patch_dropout_steps` steps
    patch_dropout_steps: int = 0
    max_skipped_steps: int = 1  # in a row, before training stops
    rollback: RollbackConfig | None = None
    slow_rank: Literal["report", "stop"] = "report"
    seed: int = 0
    repeats: int = 1  # of each image in a global batch
    few_shot_steps: tuple[int, ...] = ()  # shortest interval of each few-shot set; 0: only at the end
    size_phases: tuple[SizePhase, ...] = ()  # of images that grow; (): one size

    def first_place(self, *, rank: int, micro_step: int) -> int:
        """Global batch index of a micro-batch's first image."""
        return (rank * self.accumulation_steps + micro_step) * self.micro_batch_size

    def logs_after(self, step: int) -> bool:
        return step == self.total_steps or _due(step, every=self.log_steps)

    def evaluates_after(self, step: int) -> bool:
        """True if an evaluation is due: always at the last step, not within a tenth of the interval (at least a step)
        before it. 25% of 101 steps is 25, and step 100 says nothing that step 101 does not."""
        left = self.total_steps - step
        if left == 0 or self.eval_steps == 1:
            return True
        return _due(step, every=self.eval_steps) and left > max(1, self.eval_steps // 10)

    def few_shot_after(self, step: int, *, number: int) -> bool:
        every = self.few_shot_steps[number]
        return step == self.total_steps or (every > 0 and step // every > (step - self.eval_steps) // every)

    def saves_after(self, step: int) -> bool:
        """True if a checkpoint is due after `step` steps; does not count the final one."""
        due = _due(step, every=self.save_steps) or _due(step, every=self.keep_steps)
        return due or (self.save_after_evaluations and self.evaluates_after(step))

    def reads_after(self, step: int) -> bool:
        return self.logs_after(step) or self.evaluates_after(step) or self.saves_after(step)

    @property
    def rollback_reach_steps(self) -> int:
        """Most steps between noticing trouble and the checkpoint to roll back to; 0: no rollback."""
        if self.rollback is None:
            return 0
        noticed = (self.log_steps or self.total_steps) if self.rollback.spike_sigmas else 0
        return max(noticed, self.rollback.after_skipped_steps) + self.rollback.steps_before

    @property
    def most_within_reach(self) -> int:
        """Most checkpoints kept at once for a rollback, save_every_minutes apart."""
        reach = min(self.rollback_reach_steps, self.total_steps)
        every = (self.save_steps, self.keep_steps, self.eval_steps if self.save_after_evaluations else 0)
        return 1 + sum(-(-reach // each) for each in every if each) if reach else 0

    def new_image_size(self, step: int) -> int | None:
        """Side of the images from this step on, if it was another before."""
        return next((each.image_size for each in self.size_phases[1:] if each.first_step == step), None)

    def describe_sizes(self) -> str:
        """List the phases of images that grow; "" if they do not."""
        return ", ".join(f"{each.image_size} px from step {each.first_step:,}" for each in self.size_phases)

    def describe(self) -> str:
        images = self.total_steps * self.global_batch_images
        return (
            f"global batch {self.global_batch_images} = {counted(self.world_size, 'process')} x "
            f"{counted(self.accumulation_steps, 'micro-batch')} x "
            f"{counted(self.micro_batch_size, 'image')}; {counted(self.total_steps, 'step')} = {images:,} images "
            f"= {images / self.samples_per_epoch:.1f} epochs of {self.samples_per_epoch:,}"
            f"{f', each image {self.repeats} times in a batch' if self.repeats > 1 else ''}; {self.lanes} lanes"
        )


def plan_stage(recipe: Recipe, *, stage: StageName, samples_per_epoch: int, world_size: int) -> StagePlan:
    """Derive a training stage's numbers; UserError names a key that does not fit, and values that do."""
    config = recipe.train_stage(stage)
    batch, lanes = config.global_batch_size, recipe.lanes(config, processes=world_size)
    _check_sizes(recipe, stage=stage, lanes=lanes, num_samples=samples_per_epoch, world_size=world_size)
    per_process = batch // world_size
    sizes = (n for n in range(1, per_process + 1) if per_process % n == 0)
    accumulation = next(n for n in sizes if per_process // n <= recipe.engine.max_micro_batch_size)

    def steps(text: str, *, of: int | None = None) -> int:
        return in_steps(
            parse_duration(text), global_batch_images=batch, samples_per_epoch=samples_per_epoch, total_steps=of
        )

    try:
        total = steps(config.duration)
    except ValueError as error:
        raise UserError(f"stages.{stage}.duration: {error}") from error
    steps = partial(steps, of=total)
    warmup, cooldown = steps(config.schedule.warmup), steps(config.schedule.cooldown)
    unmasked, evaluation = steps(config.unmasked_finish), steps(config.eval_every)
    few_shot_sets: tuple[FewShotConfig, ...] = getattr(config, "few_shot", ())
    plan = StagePlan(
        world_size=world_size,
        global_batch_images=batch,
        micro_batch_size=per_process // accumulation,
        accumulation_steps=accumulation,
        lanes=lanes,
        total_steps=total,
        samples_per_epoch=samples_per_epoch,
        schedule=Schedule(
            peak_lr=config.optimizer.lr,
            total_steps=total,
            warmup_steps=warmup,
            decay=config.schedule.decay,
            end_lr=config.schedule.end_lr,
            timescale_steps=steps(config.schedule.timescale),
            cooldown_steps=cooldown,
        ),
        log_steps=steps(config.log_every),
        eval_steps=evaluation,
        save_steps=steps(config.save_every),
        keep_steps=steps(config.keep_every),
        save_after_evaluations=bool(config.keep_best),
        patch_dropout=config.patch_dropout,
        patch_dropout_steps=total - unmasked if config.patch_dropout else 0,
        max_skipped_steps=recipe.engine.max_skipped_steps,
        rollback=config.rollback,
        slow_rank=recipe.engine.slow_rank,
        seed=recipe.seed,
        repeats=config.augment.repeats,
        few_shot_steps=tuple(1 if each.every is None else steps(each.every) for each in few_shot_sets),
    )
    _check_lengths(plan, config, stage=stage)
    if growth := growth_of(config.image_size):
        over, stride = steps(growth.over), growth.to // recipe.model.grid_size(growth.to)
        key = f"stages.{stage}.image_size"
        phases = growth.phases(stride, over_steps=over, total_steps=total, key=key)
        return replace(plan, size_phases=phases)
    return plan


def _check_sizes(recipe: Recipe, *, stage: StageName, lanes: int, num_samples: int, world_size: int) -> None:
    batch = recipe.train_stage(stage).global_batch_size
    key = f"stages.{stage}.global_batch_size"
    if 0 < num_samples < batch:
        raise UserError(
            f"{key} is {batch:,}, but the training set has only {num_samples:,} images, which each step would see more "
            f"than once: set it to {1 << (num_samples.bit_length() - 1)}, or less"
        )
    window = recipe.data.shuffle_window_images
    check_sizes(num_samples, lanes=lanes, global_batch_images=batch, window_images=window)
    check_repeats(recipe.train_stage(stage).augment.repeats, lanes=lanes, global_batch_images=batch)
    if batch < world_size:
        raise UserError(
            f"{key} is {batch}, less than one image for each of {world_size} processes: set it to a multiple of "
            f"{world_size}, or start at most {batch} processes"
        )
    if batch % world_size:
        raise UserError(
            f"{key} {batch} does not divide among {world_size} processes: use a multiple of {world_size}, or another "
            "number of processes"
        )
    check_world_size(lanes, world_size=world_size)


def _check_lengths(plan: StagePlan, config: TrainStage, *, stage: StageName) -> None:
    total, warmup, cooldown = plan.total_steps, plan.schedule.warmup_steps, plan.schedule.cooldown_steps
    if total == 0:
        raise UserError(f"stages.{stage}.duration is zero: give at least one step")
    if warmup >= total:
        raise UserError(f"stages.{stage}.schedule.warmup takes {warmup} of {total} steps: make it shorter")
    if warmup + cooldown > total:
        raise UserError(
            f"stages.{stage}.schedule: warmup and cooldown take {warmup} and {cooldown} of {total} steps: make one of "
            "them shorter"
        )
    if config.patch_dropout and plan.patch_dropout_steps <= 0:
        raise UserError(
            f"stages.{stage}.unmasked_finish takes {total - plan.patch_dropout_steps} of {total} steps, and nothing is "
            "left for patch_dropout: make it shorter"
        )
    for number, every in enumerate(plan.few_shot_steps):
        given = getattr(config, "few_shot")[number].every  # noqa: B009
        if given is not None and 0 < every < (plan.eval_steps or total):
            raise UserError(
                f"stages.{stage}.few_shot.{number}.every takes {every} steps and eval_every {plan.eval_steps}: it is "
                "measured at evaluations alone; make it longer, or eval_every shorter"
            )


def _due(step: int, *, every: int) -> bool:
    return every > 0 and step % every == 0


_TOP = 5


def chosen_metrics(
    asked: Sequence[EvalMetric] | Literal["auto"],
    *,
    label_kind: LabelKind,
    num_classes: int,
    flag: str,
) -> tuple[EvalMetric, ...]:
    """Choose a set's metrics; `flag` names the key in messages. UserError if one does not fit the labels."""
    if asked == "auto":
        if label_kind == "multi":
            return ("precision_at_1",)
        return ("top5", "calibration_error") if num_classes > _TOP else ("calibration_error",)
    refused = OF_ONE_LABEL if label_kind == "multi" else OF_SEVERAL_LABELS
    for each in asked:
        if each in refused:
            these = "images have several labels each" if label_kind == "multi" else "each image has one label"
            raise UserError(f"{flag} names {each}, which has no effect where {these}: leave it out")
    return tuple(asked)
