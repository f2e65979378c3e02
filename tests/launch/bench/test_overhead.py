"""The engine beside plain torch: exact counts within their bounds, and the table that shows them."""

from dataclasses import replace
from functools import cache

import pytest

from shardvit.launch.bench.evaluation_memory import kept_bytes_per_image
from shardvit.launch.bench.overhead import (
    COMPILED,
    DEFAULT,
    EVALUATION_BYTES,
    ROWS,
    Bounded,
    report,
    run_cases,
)
from shardvit.launch.bench.overhead_child import Case, Counted, Spent

BOUNDED = [row for row in ROWS if row.most and not row.case.compiles]


def is_slow(row: Bounded) -> bool:
    """Two processes for the engines alone, four for none."""
    return row.case.ranks > 2 or (row.case.ranks == 2 and bool(row.case.optimizer or row.case.stage))


@cache
def counted(ranks: int, *, slow: bool) -> dict[str, list[Counted]]:
    """All rows of so many processes, by name, in one set of processes: most of their time is that of imports."""
    cases = [replace(row.case, timed_steps=0) for row in BOUNDED if (row.case.ranks, is_slow(row)) == (ranks, slow)]
    return {case.name: each for case, each in zip(cases, run_cases(cases), strict=True)}


def together(one: Counted) -> list[tuple[str, float]]:
    """The collectives; in an exchange of pieces each rank has its own sizes."""
    return [(name, 0 if name == "alltoall_base" else num_bytes) for name, num_bytes, _ in one.collectives]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.case.name, marks=[pytest.mark.slow] * is_slow(row)) for row in BOUNDED]
)
def test_a_step_stays_within_its_bounds_on_every_rank(row: Bounded):
    ranks = counted(row.case.ranks, slow=is_slow(row))[row.case.name]
    assert len(ranks) == row.case.ranks
    assert {one.tensors for one in ranks} == {296}  # as many as ViT-L has: a step that works on each of them would show
    assert [row.missed(one, exact_alone=True) for one in ranks] == [{}] * len(ranks)
    assert all(together(one) == together(ranks[0]) for one in ranks)


@pytest.mark.slow  # a compiler's time
def test_all_blocks_are_one_graph():
    ((one,),) = run_cases([COMPILED])
    (row,) = (row for row in ROWS if row.case.compiles)
    assert one.graphs >= 1 and row.missed(one, exact_alone=True) == {}


def test_what_deepspeed_waits_for_is_seen_with_several_processes_too():
    """Its own step, which offload leaves to it: it synchronises the device in each backward pass, and reads norms."""
    for one in run_cases([Case(1, "bf16", ranks=2, depth=2, engine={"offload": "optimizer", "overlap": "on"})])[0]:
        assert one.waits["synchronize()"] >= 1 and one.waits["a scalar is read"] >= 1


def test_an_evaluation_keeps_answers_and_no_batch():
    few, many = (kept_bytes_per_image(batches=batches) for batches in (2, 20))
    assert few == many <= EVALUATION_BYTES


def made(**more: object) -> Counted:
    content = {
        "parameters": 100,
        "tensors": 4,
        "in_forward": 0,
        "in_backward": 6_000,
        "in_step": 40,
        "waits": {"a scalar is read": 1},
        "input_waits": {},
        "allocated_bytes": 800,
        "collectives": [("allreduce", 200, 200.0)],
        "cpu_ms": Spent(30.0, 20.0, 10.0),
        "plain_cpu_ms": Spent(20.0, 15.0, 5.0),
        "unsent_cpu_ms": Spent(26.0, 18.0, 8.0),
    }
    return Counted(**{**content, **more})


def test_a_missed_bound_is_said_and_the_worst_of_the_default_comes_first():
    rows = [Bounded(replace(DEFAULT, ranks=ranks), {"operations": 150, "waits": 1}) for ranks in (1, 2)]
    text = "\n".join(report(rows, [[made(in_backward=0)], [made(), made()]], evaluation_bytes=1e4)).strip()
    first = text.splitlines()[0]
    assert "6,040 operations outside the model (2 processes)" in first and "4 bytes sent a parameter" in first
    one, two, evaluation = (line for line in text.splitlines() if "(1" in line and "Worst" not in line)
    assert "MISSED" not in one and "operations 6,040 (150) MISSED, waits 1 (1)" in two and "MISSED" in evaluation
    assert "4.00 bytes; 1 allreduce of 200 bytes" in text and "1.50" in text and "1.30" in text


@pytest.mark.parametrize(("waits", "is_missed"), [(5, False), (6, True)])
def test_a_bound_holds_up_to_its_value(waits: int, is_missed: bool):
    assert bool(Bounded(DEFAULT, {"waits": 5}).missed(made(waits={"x": waits}))) is is_missed
