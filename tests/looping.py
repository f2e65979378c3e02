"""A training job on stand-ins around a real model: what the loop decides itself is seen in what it asks of them."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.vit import build_model
from shardvit.pipeline.engine.base import Flags, step_numbers
from shardvit.pipeline.evaluation.evaluate import evaluate
from shardvit.pipeline.ranks.phases import Phases
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import Requests, StopFlag
from shardvit.pipeline.recipe.optimizer import Schedule
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.stage.task import Example, Tally
from shardvit.pipeline.training.after_step import TrainJob

STEPS, MASKED = 6, 4
ALL, HALF = 1 + 16, 1 + 8  # tokens


def quiet(*names: str) -> dict[str, Any]:
    """Methods that do nothing."""
    return dict.fromkeys(names, lambda *args, **more: None)


def stepping(*, applied: bool, noted: list[float] | None = None) -> Callable[..., torch.Tensor]:
    """An engine's `step` of a single rank."""

    def step(*, lr: float, flags: Flags, measure: bool) -> torch.Tensor:
        if noted is not None:
            noted.append(lr)
        return step_numbers(grad_norm=1.0 if applied else math.nan, applied=applied, flags=torch.tensor(flags).float())

    return step


def job(*, patch_dropout: float, first_step: int) -> tuple[Any, list[tuple[str, int]]]:
    """A job on stand-ins around a real model, and the list in which the tokens of each forward pass are noted."""
    seen: list[tuple[str, int]] = []
    module = build_model(
        ModelConfig(width=8, depth=1, heads=2, patch_size=4),
        image_size=16,
        num_classes=2,
        head="linear",
        regularisation=Regularisation(patch_dropout=patch_dropout),
    )
    module.get_submodule("blocks.0").register_forward_pre_hook(
        lambda block, inputs: seen.append(("train" if block.training else "eval", inputs[0].shape[1]))
    )
    engine: Any = SimpleNamespace(
        module=module,
        device=torch.device("cpu"),
        forward=module,
        predict=module,
        backward=lambda loss: loss.backward(),
        step=stepping(applied=True),
        measured=dict,
        settle=lambda: None,
        pass_over=lambda flags: step_numbers(grad_norm=math.nan, applied=False, flags=torch.tensor(flags).float()),
    )
    ranks: Any = SimpleNamespace(
        place=Place(),
        gather=lambda values: values.double()[None],
        gather_objects=lambda value: [value],
    )
    faults: Any = SimpleNamespace(
        complaint="",
        note=lambda batch, *, use, rows: None,
        settle=lambda ranks: SimpleNamespace(substituted_images=0, new=()),
    )
    phases = Phases(
        watch=SimpleNamespace(**quiet("progress")),  # pyright: ignore[reportArgumentType]
        device=torch.device("cpu"),
        factor=2.0,
        least_seconds=1.0,
    )
    report: Any = SimpleNamespace(
        phases=phases,
        training_seconds=0.0,
        process_seconds=0.0,
        **quiet("step", "skipped", "curve", "spikes", "evaluation", "faults", "note"),
    )
    task: Any = SimpleNamespace(
        engine=engine,
        score="top1",
        train_metric="train/top1",
        example=lambda batch, *, use: Example((batch.images,), torch.zeros(4, dtype=torch.int64)),
        loss=torch.nn.functional.cross_entropy,
        train_score=lambda outputs, targets: (outputs.argmax(dim=1) == targets).float().mean(),
        tally=lambda outputs, targets: Tally(*torch.ones(3, 4, dtype=torch.float64)),
    )
    batch: Any = SimpleNamespace(
        images=torch.randn(4, 3, 16, 16), counted=torch.ones(4, dtype=torch.bool), samples=torch.arange(4)
    )
    plan = StagePlan(
        world_size=1,
        global_batch_images=8,
        micro_batch_size=4,
        accumulation_steps=2,
        lanes=8,
        total_steps=STEPS,
        schedule=Schedule(),
        log_steps=2,
        eval_steps=2,
        save_steps=0,
        samples_per_epoch=100,
        patch_dropout=patch_dropout,
        patch_dropout_steps=MASKED if patch_dropout else 0,
        seed=1,
    )
    whole: Any = TrainJob(
        plan=plan,
        batches=iter([batch] * (STEPS - first_step) * 2),  # pyright: ignore[reportArgumentType]
        task=task,
        engine=engine,
        evaluate=lambda step: evaluate([batch], task=task, ranks=ranks, faults=faults).metrics,
        saver=SimpleNamespace(stall_seconds=0.0, is_busy=False, **quiet("save", "poll", "finish")),  # pyright: ignore[reportArgumentType]
        faults=faults,
        report=report,
        ranks=ranks,
        requests=Requests(StopFlag(), saved_step=first_step),
    )
    return whole, seen


def saving(*, kind: type[Requests], save_steps: int) -> tuple[Any, list[str]]:
    """A job whose ranks agree as they do in earnest, and the list of what is asked of its saver."""
    calls: list[str] = []
    whole, _ = job(patch_dropout=0.0, first_step=0)
    saver: Any = SimpleNamespace(
        stall_seconds=0.0,
        is_busy=False,
        poll=lambda step, *, others: None,
        save=lambda state: calls.append(f"save {state.step}"),
        finish=lambda: calls.append("finish"),
    )
    plan = replace(whole.plan, log_steps=0, eval_steps=0, save_steps=save_steps)
    requests = kind(StopFlag(), saved_step=0)
    return replace(whole, plan=plan, saver=saver, requests=requests), calls
