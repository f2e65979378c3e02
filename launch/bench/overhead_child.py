"""Child process: engines on a deep, narrow model, and their steps' overhead over plain torch.

Started as `python -m shardvit.launch.bench.overhead_child CASES RENDEZVOUS RANK`, CASES (all with the same number of
ranks) in JSON; its last line is a `Counted` for each in JSON. As many tensors as ViT-L, but tiny ones. DeepSpeed takes
the CPU for a GPU (`operations.as_on_a_gpu`), so that it waits wherever it would there.
"""

import contextlib
import functools
import gc
import json
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch._dynamo.utils import counters

from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.mixing import Mix
from shardvit.data_shards.vocabulary import GOOGLES
from shardvit.launch.bench.operations import Operations, as_on_a_gpu
from shardvit.model.init import initialise
from shardvit.model.vit import build_model
from shardvit.pipeline.checkpoint.train_state import seed_step
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.engine.deepspeed_engine import import_deepspeed
from shardvit.pipeline.engine.late_metrics import LateMetrics
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.kernels.settle import settled_kernels
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan, plan_stage
from shardvit.pipeline.report.losses import LossWindow
from shardvit.pipeline.stage.dropout_masks import draw_masks
from shardvit.pipeline.tasks.make_task import make_task

DEPTH, WIDTH, HEADS, PATCH, SIZE, CLASSES, IMAGES = 24, 64, 2, 4, 8, 10, 2
BUCKET_ELEMENTS = 99_000  # scaled to this model from 25 million for ViT-L: one block, as two have a little more
_LR = 1e-3
_WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """One case to count: what a recipe's engine, optimizer and stage say beside `recipe_of`'s own."""

    zero_stage: int
    precision: str
    ranks: int = 1
    accumulation: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    stage: dict[str, Any] = field(default_factory=dict)
    label: str = ""  # in place of these keys
    timed_steps: int = 0  # for the CPU time; 0: not measured
    depth: int = DEPTH

    @property
    def name(self) -> str:
        keys = {**self.engine, **self.optimizer, **self.stage}
        more = [self.label] if self.label else [f"{key} {value}" for key, value in keys.items()]
        more += [f"{self.accumulation} micro-batches"] * (self.accumulation > 1)
        more += [f"{self.ranks} processes"] * (self.ranks > 1)
        return ", ".join([f"ZeRO {self.zero_stage}", self.precision, *more])

    @property
    def sends_by_itself(self) -> bool:
        """If so, the engine's own code sends, not DeepSpeed's or DDP's."""
        return self.ranks > 1 and self.zero_stage in (1, 2) and "offload" not in self.engine

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
    waits: dict[str, int]  # from the batch on the device to the end of the step, by reason
    input_waits: dict[str, int]  # of what goes from the host to another device in each step
    allocated_bytes: int  # beyond plain torch's, in backward and step
    collectives: list[tuple[str, int, float]]  # name, bytes, bytes that each rank sends in a ring
    cpu_ms: Spent | None  # minimum of each over the steps
    plain_cpu_ms: Spent | None  # of plain torch, alternating with it
    unsent_cpu_ms: Spent | None  # with a process group that sends nothing, as NCCL's sends without the CPU
    graphs: int = 0  # compiled for the blocks
    graph_breaks: int = 0


def recipe_of(case: Case) -> Recipe:
    """A classifier, by default under AdamW with two decay settings and clipping."""
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
        "optimizer": {"name": "adamw", "lr": _LR, "weight_decay": 0.1, "clip_grad_norm": 1.0, **case.optimizer},
        "head": "linear",
        **case.stage,
    }
    model = {"width": WIDTH, "depth": case.depth, "heads": HEADS, "patch_size": PATCH}
    content = {"name": "overhead", "model": model, "data": {"lanes": case.ranks}, "engine": engine}
    return Recipe.model_validate({**content, "stages": {"pretrain": stage}})


def build(recipe: Recipe) -> nn.Module:
    """Build the model, with the same weights each time."""
    stage = recipe.train_stage("pretrain")
    model = build_model(
        recipe.model, image_size=SIZE, num_classes=CLASSES, head="linear", regularisation=stage.regularisation
    )
    initialise(model, seed=0)
    return model.train()


def batch(*, mix: Mix | None = None) -> Batch:
    """Uint8 pixels and labels in the loader's format."""
    generator, rows = torch.Generator().manual_seed(0), IMAGES + (mix is not None)
    return Batch(
        images=torch.randint(256, (rows, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator),
        mirrored=torch.arange(rows) % 2 == 0,
        labels=torch.arange(rows) % CLASSES,
        counted=torch.ones(rows, dtype=torch.bool),
        substituted=torch.zeros(rows, dtype=torch.bool),
        samples=torch.arange(rows),
        epochs=torch.zeros(rows, dtype=torch.long),
        keys=tuple(map(str, range(rows))),
        mix=mix,
    )


def counted(case: Case, *, ranks: Ranks) -> Counted:
    """Open the engine, count one step and time several."""
    recipe = recipe_of(case)
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=10**6, world_size=ranks.place.world_size)
    reference = _Plain(case)
    for _ in range(_WARM_UP):
        reference.step()
    plain = _phases(Operations)
    reference.step(plain)

    counters.clear()
    model = build(recipe)
    parameters = [each.numel() for each in model.parameters()]
    with settled_kernels(recipe, stage="pretrain", model=model) as kernels:
        with seen_waits(case):
            engine = open_engine(recipe, stage="pretrain", plan=plan, model=model, ranks=ranks)
            engine.module.train()
            _fuse()
            ours = OurSteps(recipe, engine, plan=plan, rank=ranks.place.rank)
            for _ in range(_WARM_UP):
                ours.step()
            phases = _phases(Operations)
            if not case.compiles:
                ours.step(phases)
        turns: dict[str, Callable[[Any], None]] = {"ours": ours.step, "plain": reference.step}
        if case.sends_by_itself:
            turns["unsent"] = partial(_unsent, ours.step)
        spent = _by_turns(turns, times=case.timed_steps)
        engine.close()
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
        input_waits=_input_waits(recipe, plan=plan),
        allocated_bytes=phases.backward.allocated_bytes + phases.step.allocated_bytes - plain.backward.allocated_bytes,
        collectives=[(each.name, each.num_bytes, each.sent_bytes(world_size)) for each in collectives],
        cpu_ms=spent.get("ours"),
        plain_cpu_ms=spent.get("plain"),
        unsent_cpu_ms=spent.get("unsent"),
        graphs=len(kernels.compiled.graphs) if kernels.compiled else 0,
        graph_breaks=sum(counters["graph_break"].values()),
    )


def _phases(make: Callable[[], Any]) -> Any:
    return types.SimpleNamespace(**{name: make() for name in ("forward", "backward", "step", "rest")})


_NOT_COUNTED = _phases(contextlib.nullcontext)


class _Plain:
    """Reference: torch's own layers in the same dtype, autograd and fused AdamW; no dropout, clipping or checks."""

    def __init__(self, case: Case) -> None:
        dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
        recipe = recipe_of(Case(1, case.precision, depth=case.depth))
        self.model = build(recipe).to(dtype)
        self.optimizer = build_optimizer(self.model, recipe.train_stage("pretrain").optimizer)
        for group in self.optimizer.param_groups:
            group["fused"] = True
        self.images = torch.randn(IMAGES, 3, SIZE, SIZE, dtype=dtype)
        self.labels, self.accumulation = batch().labels, case.accumulation
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


class OurSteps:
    """The training loop's calls in a step that logs nothing, with the product's own task."""

    def __init__(self, recipe: Recipe, engine: Engine, *, plan: StagePlan, rank: int) -> None:
        self.engine, self.plan, self.rank = engine, plan, rank
        self.task, self.batch = _task(recipe, engine), batch(mix=_mix(recipe))
        self.losses, self.late, self.number = LossWindow([]), LateMetrics(device=engine.device), 0

    def step(self, counts: Any = _NOT_COUNTED) -> None:
        with counts.rest:
            seed_step(self.plan.seed, step=self.number, rank=self.rank)
        for micro_step in range(self.plan.accumulation_steps):
            with counts.rest:
                example = self.task.example(self.batch, use="train")
            with counts.forward:
                place = self.plan.first_place(rank=self.rank, micro_step=micro_step)
                draw_masks(self.engine, plan=self.plan, step=self.number, place=place)
                outputs = self.engine.forward(*example.inputs)
            with counts.rest:
                loss = self.task.loss(outputs, example.targets)
            with counts.backward:
                self.engine.backward(loss)
            with counts.rest:
                self.losses.add(loss, self.task.train_score(outputs, example.targets))
        with counts.step:
            result = self.engine.step(lr=_LR, flags=(False,) * 3)
        with counts.rest:
            self.losses.end_step()
            self.number += 1
            self.late.put(self.number, result)
            self.late.ready()


def _task(recipe: Recipe, engine: Any) -> Any:
    train = types.SimpleNamespace(classes=tuple(map(str, range(CLASSES))), is_multi_label=False)
    data: Any = types.SimpleNamespace(train=train)
    return make_task(recipe, stage="pretrain", data=data, normalisation=GOOGLES, engine=engine)


def _mix(recipe: Recipe) -> Mix | None:
    return Mix("mixup", keep=0.7) if recipe.train_stage("pretrain").augment.mixup_alpha else None


def _input_waits(recipe: Recipe, *, plan: StagePlan) -> dict[str, int]:
    """Count the waits of a second batch that the prefetch has brought to a device; `meta` stands for a GPU."""
    meta = torch.device("meta")
    engine: Any = types.SimpleNamespace(device=meta, input_dtype=torch.bfloat16, module=build(recipe))
    task, given = _task(recipe, engine), batch(mix=_mix(recipe))
    given = replace(given, **{name: getattr(given, name).to(meta) for name in ("images", "mirrored", "labels")})
    counts = [Operations(), Operations()]
    for step, operations in enumerate(counts):
        with operations:
            task.example(given, use="train")
            draw_masks(engine, plan=plan, step=step, place=0)
    return dict(counts[-1].waits)


@contextlib.contextmanager
def seen_waits(case: Case) -> Iterator[None]:
    """Let DeepSpeed wait as on a GPU; ZeRO 0 does not import it."""
    if case.zero_stage:
        import_deepspeed()
    with as_on_a_gpu() if case.zero_stage else contextlib.nullcontext():
        yield


def _fuse() -> None:
    """Make every AdamW fused, as the product does on a GPU."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.AdamW):  # isinstance would touch objects that warn
            for group in each.param_groups:
                group["fused"] = True


@functools.cache
def _silent_group() -> Any:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    return distributed.new_group(backend="fake")


def _unsent(step: Callable[[Any], None], counts: Any) -> None:
    """Step with collectives that return at once; gradients are 0, since what was never received may be nan."""
    group = _silent_group()

    def reduce_scatter(output: torch.Tensor, *inputs: Any, **more: Any) -> Any:
        output.zero_()
        return scatter(output, *inputs, group=group, **more)

    scatter = distributed.reduce_scatter_tensor
    silent: Any = {
        name: partial(getattr(distributed, name), group=group) for name in ("all_gather_into_tensor", "all_reduce")
    }
    with mock.patch.multiple(distributed, reduce_scatter_tensor=reduce_scatter, **silent):
        step(counts)


def _by_turns(steps: dict[str, Callable[[Any], None]], *, times: int) -> dict[str, Spent]:
    """Alternate the steps; returns each one's minima, nothing if `times` is 0."""
    spent: dict[str, list[Spent]] = {name: [] for name in steps}
    for _ in range(times):
        for name, step in steps.items():
            passes, last = _Clock(), _Clock()
            step(types.SimpleNamespace(forward=passes, backward=passes, rest=passes, step=last))
            spent[name].append(Spent(passes.ms + last.ms, passes.ms, last.ms))
    keys = ("whole", "passes", "step")
    return {
        name: Spent(**{key: min(getattr(one, key) for one in each) for key in keys})
        for name, each in spent.items()
        if each
    }


class _Clock:
    """Accumulates CPU milliseconds of all threads while entered. A thread that waits for another rank sleeps, so its
    waiting is not counted."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __enter__(self) -> None:
        self._before = time.process_time()

    def __exit__(self, *error: object) -> None:
        self.ms += 1000 * (time.process_time() - self._before)


def main() -> None:
    """Count one rank and print the result."""
    cases, rank = [Case(**each) for each in json.loads(sys.argv[1])], int(sys.argv[3])
    torch.set_num_threads(1)
    world = cases[0].ranks
    place = Place(rank, world, local_rank=rank, local_world_size=world, rendezvous=Path(sys.argv[2]))
    ranks = Ranks(place, timeout_seconds=300)
    try:
        found = [asdict(counted(case, ranks=ranks)) for case in cases]
    finally:
        ranks.leave()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
