"""20 steps of a small ViT through an engine, on any device and number of ranks, and the same in plain torch on the CPU.

A difference is the largest of a step's losses, as a share of the first loss. `TOLERANCES` bound it by precision: IEEE
float32 adds up in another order, the others round what they compute with to 10 (TF32, fp16) or 7 bits of mantissa. On
an H100 differences were at most half of these (launch/bench/records/gpu_first_runs.txt).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardvit.model.init import initialise
from shardvit.model.vit import build_model, checkpoint_blocks
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.engine.late_metrics import LateMetrics, StepOutcome
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.engine.saved_state.state_files import StateFile, write_file
from shardvit.pipeline.kernels.settle import Kernels, settled_kernels
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan, plan_stage

STEPS, CLASSES, SIZE, IMAGES = 20, 10, 16, 16
MODEL = {"width": 64, "depth": 2, "heads": 2, "patch_size": 4}
LR, CLIP = 1e-3, 1.0
TOLERANCES = {"fp32": 5e-5, "tf32": 5e-3, "fp16": 5e-3, "bf16": 2e-2}
ENGINES: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"zero_stage": stage} for stage in range(4)},
    "accelerate": {"zero_stage": 0, "backend": "accelerate"},
}


def recipe_for(
    engine: Mapping[str, Any], *, optimizer: Mapping[str, Any] | None = None, accumulation: int = 1, **stage: Any
) -> Recipe:
    """A recipe of the small model; nothing is compiled unless `engine` says so."""
    size = {"max_micro_batch_size": IMAGES // accumulation}
    return Recipe.model_validate(
        {
            "name": "acceptance",
            "model": MODEL,
            "data": {"lanes": IMAGES},
            "engine": {"precision": "fp32", "compile": "off", **size, **engine},
            "stages": {
                "pretrain": {
                    "train": "none",
                    "eval": "none",
                    "image_size": SIZE,
                    "global_batch_size": IMAGES,
                    "duration": f"{STEPS} steps",
                    "head": "linear",
                    "optimizer": {
                        **{"name": "adamw", "lr": LR, "weight_decay": 0.1, "clip_grad_norm": CLIP},
                        **(optimizer or {}),
                    },
                    **stage,
                }
            },
        }
    )


def model_of(recipe: Recipe) -> nn.Module:
    """The same weights each time; the head's are not zero, which would hide the trunk's gradients."""
    model = build_model(recipe.model, image_size=SIZE, num_classes=CLASSES, head="linear")
    initialise(model, seed=3)
    head: Any = model.get_submodule("head")
    nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(5))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """One of two batches, so that 20 steps learn them."""
    draw = torch.Generator().manual_seed(100 + step % 2)
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=draw)
    return images, torch.randint(0, CLASSES, (IMAGES,), generator=draw)


def lr_at(step: int, *, peak: float) -> float:
    return peak * (1 - step / (2 * STEPS))


@dataclass
class Opened:
    """An engine that trains the small model."""

    engine: Engine
    recipe: Recipe
    plan: StagePlan
    ranks: Ranks
    kernels: Kernels

    def run(self, steps: Iterable[int], *, poisoned: int = -1, each: Callable[[], object] = bool) -> list["Row"]:
        """Train; step `poisoned` has a NaN on the last rank. `each` is called after every step."""
        return [self._step(step, is_poisoned=step == poisoned, each=each) for step in steps]

    def _step(self, step: int, *, is_poisoned: bool, each: Callable[[], object]) -> "Row":
        engine, plan, rank = self.engine, self.plan, self.ranks.place.rank
        late, losses = LateMetrics(device=engine.device), list[Tensor]()
        images, labels = (every.to(engine.device) for every in batch(step))
        if is_poisoned and rank == self.ranks.place.world_size - 1:
            images = images * float("nan")
        for micro_step in range(plan.accumulation_steps):
            first = (rank * plan.accumulation_steps + micro_step) * plan.micro_batch_size
            part = slice(first, first + plan.micro_batch_size)
            outputs = engine.forward(images[part].to(engine.input_dtype))
            loss = functional.cross_entropy(outputs.float(), labels[part])
            engine.backward(loss)
            losses.append(loss.detach())
        peak = self.recipe.train_stage("pretrain").optimizer.lr
        late.put(step + 1, engine.step(lr=lr_at(step, peak=peak), flags=()))
        (outcome,) = late.drain()
        each()
        return Row(float(self.ranks.gather(torch.stack(losses)).mean()), outcome)

    def write(self, folder: Path) -> Path:
        """Write the engine's state, as a checkpoint does."""
        folder.mkdir(exist_ok=True)
        for file in self.engine.snapshot():
            write_file(folder, file)
        self.ranks.barrier()
        return folder

    def load(self, folder: Path, *, written_by: Recipe) -> None:
        written = {"zero_stage": written_by.engine.zero_stage, "processes": self.ranks.place.world_size}
        self.engine.load(folder, written=written)


@dataclass(frozen=True)
class Row:
    """A step's mean loss over the ranks, and what the engine says of it."""

    loss: float
    outcome: StepOutcome


@contextlib.contextmanager
def opened(recipe: Recipe, *, ranks: Ranks) -> Iterator[Opened]:
    """Open an engine as a stage does."""
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=10**6, world_size=ranks.place.world_size)
    model = model_of(recipe)
    if recipe.engine.checkpointed_every:
        checkpoint_blocks(model, every=recipe.engine.checkpointed_every)
    with settled_kernels(recipe, stage="pretrain", model=model) as kernels:
        engine = open_engine(recipe, stage="pretrain", plan=plan, model=model, ranks=ranks)
        engine.module.train()
        try:
            yield Opened(engine, recipe, plan, ranks, kernels)
        finally:
            engine.close()
            forget_accelerate(recipe)


def forget_accelerate(recipe: Recipe) -> None:
    """Let another engine of this process have another precision: accelerate keeps the first one."""
    if recipe.engine.backend == "accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


@dataclass(frozen=True)
class Plain:
    """What plain torch trained; a step that was not applied has a loss, too."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    start: dict[str, Tensor]


def plain(recipe: Recipe, *, applied: Sequence[bool] = (True,) * STEPS) -> Plain:
    """Train in float32 on the CPU. AdamW is torch's own; others, and groups with rates of their own, are the product's
    optimizers without an engine."""
    model, config = model_of(recipe), recipe.train_stage("pretrain").optimizer
    start = {name: each.clone() for name, each in model.state_dict().items()}
    is_torchs = config.name == "adamw" and config.layer_decay == config.head_lr_factor == 1
    optimizer = _torchs(model, recipe) if is_torchs else build_optimizer(model, config)
    losses, norms = list[float](), list[float]()
    for step, is_applied in enumerate(applied):
        images, labels = batch(step)
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, peak=config.lr) * group.get("lr_scale", 1.0)
        if is_applied:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Plain(losses, norms, model.state_dict(), start)


def _torchs(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    config = recipe.train_stage("pretrain").optimizer
    kernels = [each.weight for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    others = [each for each in model.parameters() if all(each is not kernel for kernel in kernels)]
    groups = [{"params": kernels, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def difference(rows: Sequence[Row], reference: Plain) -> float:
    """The largest, over the applied steps, of the losses' differences; AssertionError if nothing was learnt."""
    assert len(rows) == len(reference.losses) == STEPS
    first, last = reference.losses[0], reference.losses[-1]
    assert last < 0.8 * first, "the reference does not learn, so that a difference would not show"
    pairs = zip(rows, reference.losses, strict=True)
    return max(abs(row.loss - loss) for row, loss in pairs if row.outcome.applied) / first


def snapshot_copy(files: Sequence[StateFile]) -> list[Tensor]:
    """Copies of all of a snapshot's tensors, on the host."""
    return [tensor.detach().cpu().clone() for file in files for tensor in file.tensors or ()]


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
