"""The host waits for the device nowhere in a step that does not log.

On a GPU torch raises at whatever waits (`torch.cuda.set_sync_debug_mode`) but collectives and calls of `synchronize`,
of which those of torch and DeepSpeed are counted, not those of streams and events; on the CPU waits are recognised by
kind, and DeepSpeed is told that it is on a GPU (`launch.bench.operations`).
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from shardvit.launch.bench.operations import Operations, watched_synchronisations
from shardvit.launch.bench.overhead_child import Case, OurSteps, build, recipe_of, seen_waits
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.kernels.settle import settled_kernels
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.stage_plan import plan_stage
from tests.gpu.twenty_steps import forget_accelerate

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
WARM_UP, STEPS = 4, 5
OFF = {"compile": "off"}
CASES = [
    *(Case(stage, precision, engine=OFF) for stage in (0, 1, 2) for precision in ("fp32", "bf16")),
    Case(0, "bf16", engine={**OFF, "backend": "accelerate"}),
    Case(1, "bf16", accumulation=2, engine=OFF),
    Case(1, "bf16", engine={**OFF, "overlap": "on"}),
    Case(1, "bf16", engine={**OFF, "activation_checkpointing": True}),
    Case(1, "bf16", engine={"compile": "blocks"}),
    *(Case(1, "bf16", engine=OFF, stage=each) for each in ({"ema": {"decay": 0.99}}, {"patch_dropout": 0.5})),
    Case(1, "bf16", engine=OFF, stage={"dropout": 0.1, "stochastic_depth": 0.1}),
    Case(1, "bf16", engine=OFF, optimizer={"first_moment": "bf16"}),
    *(Case(1, "bf16", engine=OFF, optimizer={"name": name}) for name in ("sgd", "lamb", "muon")),
    Case(0, "bf16", engine=OFF, optimizer={"name": "adafactor"}),
]


@pytest.mark.parametrize("case", [replace(case, depth=4) for case in CASES], ids=lambda case: case.name)
def test_a_step_that_does_not_log_does_not_wait(case: Case, ranks: Ranks, device):
    on_gpu = device.type == "cuda"
    if case.compiles and not on_gpu:
        pytest.skip("what watches operations on the CPU makes compiled code run eagerly")
    recipe = recipe_of(case)
    plan, model = plan_stage(recipe, stage="pretrain", samples_per_epoch=10**6, world_size=1), build(recipe)
    pretends = contextlib.nullcontext() if on_gpu else seen_waits(case)
    with settled_kernels(recipe, stage="pretrain", model=model), pretends:
        engine = open_engine(recipe, stage="pretrain", plan=plan, model=model, ranks=ranks)
        engine.module.train()
        steps = OurSteps(recipe, engine, plan=plan, rank=0)
        given = {name: getattr(steps.batch, name).to(device) for name in ("images", "mirrored", "labels")}
        steps.batch = replace(steps.batch, **given)
        for _ in range(WARM_UP):
            steps.step()
        with raising_at_waits() if on_gpu else Operations() as seen:
            counts = SimpleNamespace(**dict.fromkeys(("forward", "backward", "step", "rest"), contextlib.nullcontext()))
            for _ in range(STEPS):
                steps.step(counts)
        engine.close()
    forget_accelerate(recipe)
    assert not (seen.waits if isinstance(seen, Operations) else seen)
    assert on_gpu or seen.total > 0


@contextlib.contextmanager
def raising_at_waits() -> Iterator[Counter[str]]:
    torch.cuda.synchronize()
    before, calls = torch.cuda.get_sync_debug_mode(), Counter[str]()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with watched_synchronisations(calls):
            yield calls
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_what_waits_is_seen(device):
    value = torch.ones(3, device=device)
    if device.type == "cuda":
        with pytest.raises(RuntimeError, match="synchroniz"), raising_at_waits():
            value.sum().item()
    else:
        with Operations() as seen:
            value.sum().item()
        assert seen.num_waits == 1
