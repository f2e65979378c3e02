"""Child process: one engine on a deep, narrow model, and its step's overhead over plain torch.

Started as `python -m shardvit.launch.bench.overhead_child CASE RENDEZVOUS RANK`, CASE in JSON; its last line is
`Counted` in JSON. A fresh process per case, because ZeRO 3 replaces torch's linear layer. As many tensors as ViT-L, but
tiny ones.
"""

import contextlib
import gc
import json
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.utils import counters

from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.vocabulary import GOOGLES
from shardvit.launch.bench.operations import Operations, synchronising_keys
from shardvit.model.init import initialise
from shardvit.model.vit import build_model
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.engine.late_metrics import LateMetrics
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.kernels.settle import settled_kernels
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.report.losses import LossWindow
from shardvit.pipeline.stage.task import make_task

DEPTH, WIDTH, HEADS, PATCH, SIZE, CLASSES, IMAGES = 24, 64, 2, 4, 8, 10, 2
BUCKET_ELEMENTS = 100_000  # scaled to this model from 25 million for ViT-L
_LR = 1e-3
_WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """One case to count."""

    zero_stage: int
    precision: str
    ranks: int = 1
    accumulation: int = 1
    engine: dict[str, Any] = field(default_factory=dict)  # more engine keys of the recipe
    timed_steps: int = 0  # for the CPU time; 0: not measured
    depth: int = DEPTH

    @property
    def name(self) -> str:
        more = "".join(f", {key} {value}" for key, value in self.engine.items())
        return f"ZeRO {self.zero_stage}, {self.precision}{more}"

    @property
    def compiles(self) -> bool:
        """If so, operations are not counted: under a dispatch mode torch runs compiled code eagerly."""
        return self.engine.get("compile") == "blocks"


@dataclass(frozen=True)
class Spent:
    """CPU milliseconds of a process, all threads."""

    whole: float  # an optimizer step and everything before it
    passes: float  # of these, forward and backward passes, the batch and the loss
    step: float  # of these, the optimizer's step


@dataclass
class Counted:
    """Counts of one rank in a step that logs nothing."""

    parameters: int
    tensors: int
    in_forward: int  # operations beyond plain torch's
    in_backward: int
    in_step: int
    waits: dict[str, int]  # from the batch on the host to the end of the step, by reason
    input_waits: dict[str, int]  # when moving a batch to another device
    synchronising_keys: list[str]
    allocated_bytes: int  # beyond plain torch's, in backward and step
    collectives: list[tuple[str, int, float]]  # name, bytes, bytes that each rank sends in a ring
    cpu_ms: Spent | None  # minimum of each over the steps
    plain_cpu_ms: Spent | None  # of plain torch, alternating with it
    graphs: int = 0  # compiled for the blocks
    graph_breaks: int = 0


def recipe_of(case: Case) -> Recipe:
    """A classifier under AdamW with two decay settings and clipping."""
    engine = {
        "zero_stage": case.zero_stage,
        "precision": case.precision,
        "max_micro_batch_size": IMAGES,
        **({"bucket_elements": BUCKET_ELEMENTS} if case.zero_stage else {}),
        **case.engine,
    }
    stage = {
        "train": "none",
        "eval": "none",
        "image_size": SIZE,
        "global_batch_size": case.ranks * case.accumulation * IMAGES,
        "duration": "1000 steps",
        "optimizer": {"name": "adamw", "lr": _LR, "weight_decay": 0.1, "clip_grad_norm": 1.0},
        "head": "linear",
    }
    model = {"width": WIDTH, "depth": case.depth, "heads": HEADS, "patch_size": PATCH}
    content = {"name": "overhead", "model": model, "data": {"lanes": case.ranks}, "engine": engine}
    return Recipe.model_validate({**content, "stages": {"pretrain": stage}})


def build(recipe: Recipe) -> nn.Module:
    """Build the model, with the same weights each time."""
    model = build_model(recipe.model, image_size=SIZE, num_classes=CLASSES, head="linear")
    initialise(model, seed=0)
    return model.train()


def batch() -> Batch:
    """Uint8 pixels and labels in the loader's format."""
    generator = torch.Generator().manual_seed(0)
    return Batch(
        images=torch.randint(256, (IMAGES, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator),
        mirrored=torch.arange(IMAGES) % 2 == 0,
        labels=torch.arange(IMAGES) % CLASSES,
        counted=torch.ones(IMAGES, dtype=torch.bool),
        substituted=torch.zeros(IMAGES, dtype=torch.bool),
        samples=torch.arange(IMAGES),
        epochs=torch.zeros(IMAGES, dtype=torch.long),
        keys=tuple(map(str, range(IMAGES))),
    )


def counted(case: Case, *, ranks: Ranks) -> Counted:
    """Open the engine, count one step and time several."""
    recipe = recipe_of(case)
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=10**6, world_size=ranks.place.world_size)
    reference = _Plain(recipe, accumulation=case.accumulation)
    for _ in range(_WARM_UP):
        reference.step()
    plain = _phases(Operations)
    reference.step(plain)

    model, configs = build(recipe), list[dict[str, Any]]()
    parameters = [each.numel() for each in model.parameters()]
    with _seen_configurations(configs), settled_kernels(recipe, stage="pretrain", model=model) as kernels:
        engine = open_engine(recipe, stage="pretrain", plan=plan, model=model, ranks=ranks)
        engine.module.train()
        _fuse()
        ours = _Ours(recipe, engine, accumulation=case.accumulation)
        for _ in range(_WARM_UP):
            ours.step()
        phases = _phases(Operations)
        if not case.compiles:
            ours.step(phases)
        spent = _by_turns({"ours": ours.step, "plain": reference.step}, times=case.timed_steps)
    every = phases.rest.waits + phases.forward.waits + phases.backward.waits + phases.step.waits
    world_size = ranks.place.world_size
    collectives = [*phases.forward.collectives, *phases.backward.collectives, *phases.step.collectives]
    if case.compiles:
        phases = plain = _phases(Operations)
    return Counted(
        parameters=sum(parameters),
        tensors=len(parameters),
        in_forward=phases.forward.total - plain.forward.total,
        in_backward=phases.backward.total - plain.backward.total,
        in_step=phases.step.total,
        waits=dict(every),
        input_waits=_input_waits(recipe),
        synchronising_keys=[key for each in configs for key in synchronising_keys(each, processes=world_size)],
        allocated_bytes=phases.backward.allocated_bytes + phases.step.allocated_bytes - plain.backward.allocated_bytes,
        collectives=[(each.name, each.num_bytes, each.sent_bytes(world_size)) for each in collectives],
        cpu_ms=spent.get("ours"),
        plain_cpu_ms=spent.get("plain"),
        graphs=len(kernels.compiled.graphs) if kernels.compiled else 0,
        graph_breaks=sum(counters["graph_break"].values()),
    )


def _phases(make: Callable[[], Any]) -> Any:
    return types.SimpleNamespace(**{name: make() for name in ("forward", "backward", "step", "rest")})


_NOT_COUNTED = _phases(contextlib.nullcontext)


class _Plain:
    """Reference: torch's own layers in the same dtype, autograd and fused AdamW; no clipping, no checks."""

    def __init__(self, recipe: Recipe, *, accumulation: int) -> None:
        dtype = torch.float32 if recipe.engine.precision == "fp32" else torch.bfloat16
        self.model = build(recipe).to(dtype)
        self.optimizer = build_optimizer(self.model, recipe.train_stage("pretrain").optimizer)
        for group in self.optimizer.param_groups:
            group["fused"] = True
        self.images = torch.randn(IMAGES, 3, SIZE, SIZE, dtype=dtype)
        self.labels, self.accumulation = batch().labels, accumulation
        self.linear = nn.functional.linear

    def step(self, counts: Any = _NOT_COUNTED) -> None:
        with mock.patch.object(nn.functional, "linear", self.linear):  # ZeRO 3 has replaced it
            for _ in range(self.accumulation):
                with counts.forward:
                    outputs = self.model(self.images)
                with counts.rest:
                    loss = nn.functional.cross_entropy(outputs.float(), self.labels)
                with counts.backward:
                    loss.backward()
            with counts.step:
                self.optimizer.step()
                self.optimizer.zero_grad()


class _Ours:
    """The training loop's calls in a step that logs nothing, with the product's own task."""

    def __init__(self, recipe: Recipe, engine: Engine, *, accumulation: int) -> None:
        self.engine, self.accumulation = engine, accumulation
        self.task = _task(recipe, engine)
        self.batch, self.losses, self.late, self.number = batch(), LossWindow([]), LateMetrics(device=engine.device), 0

    def step(self, counts: Any = _NOT_COUNTED) -> None:
        for _ in range(self.accumulation):
            with counts.rest:
                example = self.task.example(self.batch, use="train")
            with counts.forward:
                outputs = self.engine.forward(*example.inputs)
            with counts.rest:
                loss = self.task.loss(outputs, example.targets)
            with counts.backward:
                self.engine.backward(loss)
            with counts.rest:
                self.losses.add(loss, self.task.train_score(outputs, example.targets))
        with counts.step:
            result = self.engine.step(lr=_LR, flags=(False, False))
        with counts.rest:
            self.losses.end_step()
            self.number += 1
            self.late.put(self.number, result)
            self.late.ready()


def _task(recipe: Recipe, engine: Any) -> Any:
    train = types.SimpleNamespace(classes=tuple(map(str, range(CLASSES))), is_multi_label=False)
    data: Any = types.SimpleNamespace(train=train)
    return make_task(recipe, stage="pretrain", data=data, normalisation=GOOGLES, engine=engine)


def _input_waits(recipe: Recipe) -> dict[str, int]:
    """Count the waits when moving a second batch to a device; `meta` stands for a GPU."""
    elsewhere = types.SimpleNamespace(device=torch.device("meta"), input_dtype=torch.bfloat16)
    task, moved = _task(recipe, elsewhere), batch()
    task.example(moved, use="train")
    with Operations() as operations:
        task.example(moved, use="train")
    return dict(operations.waits)


def _seen_configurations(seen: list[dict[str, Any]]) -> Any:
    from shardvit.pipeline.engine import deepspeed_engine

    make = deepspeed_engine.deepspeed_config

    def kept(*args: Any, **kwargs: Any) -> dict[str, Any]:
        seen.append(make(*args, **kwargs))
        return seen[-1]

    return mock.patch.object(deepspeed_engine, "deepspeed_config", kept)


def _fuse() -> None:
    """Make every AdamW fused, as the product does on a GPU."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.AdamW):  # isinstance would touch objects that warn
            for group in each.param_groups:
                group["fused"] = True


def _by_turns(steps: dict[str, Callable[[Any], None]], *, times: int) -> dict[str, Spent]:
    """Alternate the steps; returns each one's minima, nothing if `times` is 0."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(times):
        for name, step in steps.items():
            passes, last = _Clock(), _Clock()
            step(types.SimpleNamespace(forward=passes, backward=passes, rest=passes, step=last))
            spent[name].append((1000 * passes.seconds, 1000 * last.seconds))
    return {
        name: Spent(min(map(sum, each)), min(passes for passes, _ in each), min(step for _, step in each))
        for name, each in spent.items()
        if each
    }


class _Clock:
    """Accumulates CPU time while entered."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._before = time.process_time()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.process_time() - self._before


def main() -> None:
    """Count one rank and print the result."""
    case, rank = Case(**json.loads(sys.argv[1])), int(sys.argv[3])
    torch.set_num_threads(1)
    place = Place(rank, case.ranks, local_rank=rank, local_world_size=case.ranks, rendezvous=Path(sys.argv[2]))
    ranks = Ranks(place, timeout_seconds=300)
    try:
        found = counted(case, ranks=ranks)
    finally:
        ranks.leave()
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
