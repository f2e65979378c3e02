"""The plan's bytes against those that real engines allocate and send on two processes (gloo, CPU): within 5 %."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.budget import memory
from pipeline.budget.communication import Workload, links_of, traffic
from pipeline.budget.gpus import find_gpu
from pipeline.budget.saving import copied_bytes
from tests.pipeline.budget import engine_memory_worker as worker
from tests.pipeline.budget.planning import forecast, stage_plan
from tests.workers import run_ranks

WORLD_SIZE = 2
pytestmark = pytest.mark.slow
CASES = pytest.mark.parametrize("case", worker.CASES, ids=lambda case: "-".join(map(str, case)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0 found, for all cases: one start of the processes serves the whole module."""
    out = tmp_path_factory.mktemp("memory")
    run_ranks(Path(worker.__file__), out, world_size=WORLD_SIZE)
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


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
def test_what_rests_and_the_peak(case: Any, results: dict[str, dict[str, Any]]):
    found = results["-".join(map(str, case))]
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
def test_what_a_save_copies(case: Any, results: dict[str, dict[str, Any]]):
    found, made = results["-".join(map(str, case))], worker.recipe_of(case)
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
        ("0-bf16-1", "ddp", "overlapped"),
        ("1-bf16-1", 1, "overlapped"),
        ("1-bf16-1-off", 1, "at once"),
        ("2-bf16-1", 2, "overlapped"),
        ("3-bf16-1", 3, "overlapped"),
    ],
)
def test_what_is_sent(name: str, zero_stage: Any, way: Any, results: dict[str, dict[str, Any]]):
    """An all-reduce sends its tensor twice (less a share), an all-gather and a reduce-scatter once."""
    found = results[f"deepspeed-{name}"]
    job = Workload(found["parameters"], 2, 6, zero_stage, worker.BUCKET_ELEMENTS, way=way)
    links = links_of(find_gpu("h200"), gpus_per_node=8, node_gbps=None)
    got = traffic(job, gpus=WORLD_SIZE, links=links, compute_seconds=1.0)
    share = (WORLD_SIZE - 1) / WORLD_SIZE
    sent = found["sent"]
    reduced = 2 * sent.get("allreduce", 0) + sent.get("reduce_scatter_base", 0)
    assert got.reduce_bytes == pytest.approx(share * reduced, rel=0.01)
    assert got.gather_bytes == pytest.approx(share * sent.get("allgather_base", 0), rel=0.03)
