"""The plan's bytes against those that real engines allocate and send on two processes (gloo, CPU): within 5 %."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardvit.pipeline.budget import memory
from shardvit.pipeline.budget.communication import Workload, links_of, traffic
from shardvit.pipeline.budget.gpus import find_gpu
from shardvit.pipeline.budget.memory import copied_bytes
from tests.pipeline.budget import engine_memory_worker as worker
from tests.pipeline.budget.planning import forecast, stage_plan
from tests.workers import run_ranks

WORLD_SIZE = 2
QUICK = "deepspeed-2-bf16-1"


def slow_unless_quick(name: str) -> list[pytest.MarkDecorator]:
    return [] if name == QUICK else [pytest.mark.slow]


CASES = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=slow_unless_quick(name))
        for case in worker.CASES
        for name in [worker.name_of(case)]
    ],
)
Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def found_in(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """`found_in(case)`: what rank 0 found. The quick case has a start of the processes for itself, all others one."""
    results: dict[str, dict[str, Any]] = {}

    def found(name: str) -> dict[str, Any]:
        if name not in results:
            names = [each for each in map(worker.name_of, worker.CASES) if (each == QUICK) == (name == QUICK)]
            out = tmp_path_factory.mktemp("memory")
            (out / "cases.json").write_text(json.dumps(names), encoding="utf-8")
            run_ranks(Path(worker.__file__), out, world_size=WORLD_SIZE)
            results.update(json.loads((out / "results.json").read_text(encoding="utf-8")))
        return results[name]

    return found


def planned(case: Any, *, number: int) -> memory.State:
    made = worker.recipe_of(case)
    return memory.state_of(
        number,
        engine=made.engine,
        optimizer=made.train_stage("pretrain").optimizer,
        plan=stage_plan(processes=WORLD_SIZE, accumulation=case[3], micro_batch=worker.IMAGES),
        zero_stage=case[1],
        ema=made.train_stage("pretrain").ema,
    )


@CASES
def test_what_rests_and_the_peak(case: Any, found_in: Found):
    found = found_in(worker.name_of(case))
    held = planned(case, number=found["parameters"])
    resting = held.resting_bytes
    if case[1] == 3:  # whose gradients and bucket are never given back
        resting += held.gradients + held.buckets
    elif case[0] == "accelerate" or not case[1]:  # DDP's are not either
        resting += held.gradients
    assert resting == pytest.approx(found["resting_bytes"], rel=0.03)
    cost = forecast(worker.recipe_of(case), gpu=None, classes=worker.CLASSES).cost
    assert cost.parameters == found["parameters"]
    activation_bytes = worker.IMAGES * cost.image_bytes("all")
    assert held.peak_bytes(activation_bytes) == pytest.approx(found["peak_bytes"], rel=0.03)
    if case[4:] != ("off",):  # there the step's most is when the backward pass ends, in the one message
        assert held.backward_peak_bytes(activation_bytes) == pytest.approx(found["backward_peak_bytes"], rel=0.05)


@CASES
def test_what_a_save_copies(case: Any, found_in: Found):
    found, made = found_in(worker.name_of(case)), worker.recipe_of(case)
    stage = made.train_stage("pretrain")
    first, other = copied_bytes(
        found["parameters"],
        engine=made.engine,
        optimizer=stage.optimizer,
        ema=stage.ema,
        zero_stage=case[1],
        processes=WORLD_SIZE,
    )
    assert found["copied_bytes"] == [pytest.approx(first, rel=0.03), pytest.approx(other, rel=0.03)]


@pytest.mark.parametrize(
    ("name", "zero_stage", "way"),
    [
        pytest.param(name, zero_stage, way, marks=slow_unless_quick(name))
        for name, zero_stage, way in (
            ("deepspeed-0-bf16-1", "ddp", "overlapped"),
            ("deepspeed-1-bf16-1", 1, "overlapped"),
            ("deepspeed-1-bf16-1-off", 1, "at once"),
            ("deepspeed-2-bf16-1", 2, "overlapped"),
            ("deepspeed-3-bf16-1", 3, "overlapped"),
        )
    ],
)
def test_what_is_sent(name: str, zero_stage: Any, way: Any, found_in: Found):
    """An all-reduce sends its tensor twice (less a share), an all-gather and a reduce-scatter once."""
    found = found_in(name)
    job = Workload(found["parameters"], 2, 6, zero_stage, worker.BUCKET_ELEMENTS, way=way)
    links = links_of(find_gpu("h200"), gpus_per_node=8, node_gbps=None)
    got = traffic(job, gpus=WORLD_SIZE, links=links, compute_seconds=1.0)
    share = (WORLD_SIZE - 1) / WORLD_SIZE
    sent = found["sent"]
    reduced = 2 * sent.get("allreduce", 0) + sent.get("reduce_scatter_base", 0)
    assert got.reduce_bytes == pytest.approx(share * reduced, rel=0.01)
    assert got.gather_bytes == pytest.approx(share * sent.get("allgather_base", 0), rel=0.03)
