"""The engine beside plain torch: exact counts within their bounds, and the table that shows them."""

from dataclasses import replace

import pytest

from shardvit.launch.bench.operations import synchronising_keys
from shardvit.launch.bench.overhead import (
    COMPILED,
    OWN,
    Bound,
    bounds_of,
    bounds_of_compiling,
    bounds_of_sending,
    report,
    run_case,
)
from shardvit.launch.bench.overhead_child import Case, Counted, Spent


def test_the_default_engines_step_stays_within_its_bounds():
    (one,) = run_case(OWN)
    assert one.tensors == 296  # as many as ViT-L has: a step that works on each of them would show
    assert [each for each in bounds_of(one) if each.exact and not each.met] == []


@pytest.mark.slow  # a compiler's time
def test_all_blocks_are_one_graph():
    (one,) = run_case(replace(COMPILED, timed_steps=0))
    assert one.graphs >= 1 and [each for each in bounds_of_compiling(one) if not each.met] == []


def test_a_step_of_two_processes_sends_no_more_than_its_bound():
    one, other = run_case(Case(OWN.zero_stage, OWN.precision, ranks=2, depth=2))
    assert one.collectives == other.collectives
    assert [each for each in bounds_of_sending(one, ranks=2) if not each.met] == []


def test_defaults_of_deepspeed_that_wait_are_known():
    plain = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    assert len(synchronising_keys(plain, processes=1)) == 3
    quiet = {
        "timers": {"throughput": {"enabled": False}},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {"stage": 1, "compute_grad_norm": False},
    }
    assert synchronising_keys(quiet, processes=1) == []
    overlap = {**quiet, "zero_optimization": {**quiet["zero_optimization"], "overlap_comm": True}}
    assert synchronising_keys(overlap, processes=8) == []
    assert len(synchronising_keys(overlap, processes=1)) == 1


def test_a_missed_bound_is_said():
    counts = Counted(
        100,
        4,
        0,
        6_000,
        40,
        {"a scalar is read": 1},
        {},
        [],
        800,
        [("allreduce", 200, 200.0)],
        Spent(30.0, 20.0, 10.0),
        Spent(20.0, 15.0, 5.0),
    )
    text = "\n".join(report([(OWN, [counts]), (Case(1, "bf16", ranks=2), [counts])]))
    assert "outside the model" in text and "6,040" in text
    (line,) = (each for each in text.splitlines() if each.startswith("operations outside"))
    assert line.endswith("MISSED")
    assert "4.00 bytes; 1 allreduce of 200 bytes" in text and "1.50" in text


@pytest.mark.parametrize(("value", "met"), [(5, True), (5.1, False)])
def test_a_bound_holds_up_to_its_value(value: float, met: bool):
    assert Bound("x", value, 5).met is met
