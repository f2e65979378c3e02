"""What each rank measures of its own part of a step, and what of that counts; the verdicts are in test_slow_rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.ranks.pace import Pace
from pipeline.ranks.place import Place

SENT = ("own_seconds", "micro_batches", "seconds", "draws")


class Chorus:
    """Stands in for `Ranks`: `others` is what each other rank reports, this one's reports are kept in `sent`."""

    def __init__(self, *others: tuple[float, float, float, float]) -> None:
        self.place = Place(rank=0, world_size=1 + len(others))
        self.others = others
        self.sent: list[dict[str, float]] = []

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        self.sent.append(dict(zip(SENT, values.tolist(), strict=True)))
        return torch.stack([values, *(torch.tensor(each, dtype=torch.float64) for each in self.others)])

    def gather_objects(self, value: object) -> list[object]:
        return [f"host-{rank}" for rank in range(self.place.world_size)]


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("pipeline.ranks.pace.time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_pace(**more: Any) -> Pace:
    return Pace(host="host-0", device=torch.device("cpu"), factor=2.0, least_seconds=2.0, **more)


def phase(pace: Pace, clock: Clock, name: str, seconds: float) -> None:
    with pace.measuring(name):
        clock.now += seconds


def step(pace: Pace, clock: Clock, *, own_seconds: float, micro_batches: int = 1) -> None:
    """An optimizer step of a second for each micro-batch beside this rank's own part."""
    for _ in range(micro_batches):
        phase(pace, clock, "reading", own_seconds / 4)
        phase(pace, clock, "forward", own_seconds * 3 / 4)
        phase(pace, clock, "backward", 0.75)
        clock.now += 0.25  # the loop itself
    phase(pace, clock, "step", 0.0)


def test_own_seconds_are_the_means_of_reading_and_computing_in_this_window(clock: Clock) -> None:
    pace, ranks = make_pace(), Chorus((1, 1, 1, 0))
    step(pace, clock, own_seconds=100)  # the first one: kernels are chosen, memory is taken
    for own_seconds in (1, 3):
        step(pace, clock, own_seconds=own_seconds, micro_batches=2)
    pace.compare(ranks)  # pyright: ignore[reportArgumentType]
    step(pace, clock, own_seconds=0.5)
    pace.compare(ranks)  # pyright: ignore[reportArgumentType]
    assert ranks.sent == [
        {"own_seconds": 2, "micro_batches": 4, "seconds": 4 + 2 * 4, "draws": 0},
        {"own_seconds": 0.5, "micro_batches": 1, "seconds": 1.5, "draws": 0},
    ]


@pytest.mark.parametrize("aside", ["evaluating", "saving", "told"])
def test_the_step_after_an_evaluation_or_a_save_does_not_count(aside: str, clock: Clock) -> None:
    pace, ranks = make_pace(), Chorus((1, 1, 1, 0))
    for _ in range(3):
        step(pace, clock, own_seconds=1)
    if aside == "told":  # a checkpoint is written beside the next step
        pace.disturbed()
    else:
        phase(pace, clock, aside, 1000)
    step(pace, clock, own_seconds=500)
    step(pace, clock, own_seconds=1)
    pace.compare(ranks)  # pyright: ignore[reportArgumentType]
    assert ranks.sent == [{"own_seconds": 1, "micro_batches": 3, "seconds": 6, "draws": 0}]


def test_a_window_in_which_no_step_counts_says_nothing(clock: Clock) -> None:
    pace, ranks = make_pace(), Chorus((1, 1, 1, 0))
    step(pace, clock, own_seconds=1)
    assert pace.compare(ranks) is None  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("drawing", [True, False])
def test_a_rank_is_excused_while_pictures_are_drawn_beside_it(drawing: bool, clock: Clock) -> None:
    drawn = [0.0]
    pace, ranks = make_pace(drawing_seconds=lambda: drawn[0]), Chorus((0.1, 2, 4, 0), (0.1, 2, 4, 0))
    told: list[bool] = []
    for _ in range(6):
        for _ in range(2):
            step(pace, clock, own_seconds=1)
        drawn[0] += 0.01 * drawing
        found = pace.compare(ranks)  # pyright: ignore[reportArgumentType]
        told.append(found is not None and found.is_news)
    assert [each["draws"] for each in ranks.sent] == [float(drawing)] * 6
    assert any(told) != drawing


def test_a_single_process_gives_no_verdict(clock: Clock) -> None:
    pace = make_pace()
    for _ in range(2):
        step(pace, clock, own_seconds=1)
    assert pace.compare(Chorus()) is None  # pyright: ignore[reportArgumentType]


def test_a_forward_pass_that_waits_for_others_does_not_count(clock: Clock) -> None:
    pace, ranks = make_pace(forward="shared"), Chorus((1, 1, 1, 0))
    for _ in range(2):
        step(pace, clock, own_seconds=1)
    pace.compare(ranks)  # pyright: ignore[reportArgumentType]
    assert ranks.sent[0]["own_seconds"] == 0.25  # reading alone


@pytest.mark.gpu
def test_the_forward_pass_on_a_gpu_is_measured_on_the_gpu() -> None:
    device = torch.device("cuda")
    pace = Pace(host="h", device=device, factor=2.0, least_seconds=2.0)
    matrix = torch.randn(4096, 4096, device=device)
    with pace.measuring("step"):  # the first one does not count
        pass
    for _ in range(3):
        with pace.measuring("forward"):
            for _ in range(50):
                matrix = matrix @ matrix / 4096
    assert pace._own_seconds() > 1e-3
