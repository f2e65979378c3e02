"""Each rank's own time, and which rank is slow."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.pipeline.ranks.phases import Phases
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.slow_rank import Slowest, SlowRanks

STEP_SECONDS = 0.5  # so that the windows below take 10 s


def verdicts(
    windows: Sequence[Sequence[float]],
    *,
    factor: float = 2.0,
    least_seconds: float = 2.0,
    micro_batches: int = 20,
    seconds: float = 20 * STEP_SECONDS,
    excused: Sequence[int] = (),
) -> list[Slowest | None]:
    """What is found after each window, in which the ranks took so many seconds for a micro-batch."""
    hosts = [f"host-{rank}" for rank in range(len(windows[0]))]
    law = SlowRanks(hosts, factor=factor, least_seconds=least_seconds)
    return [law.look(own, micro_batches=micro_batches, seconds=seconds, excused=excused) for own in windows]


def news(windows: Sequence[Sequence[float]], **more: float) -> list[int | None]:
    """The rank that is told after each window."""
    found = verdicts(windows, **more)  # pyright: ignore[reportArgumentType]
    return [each.rank if each and each.is_news else None for each in found]


def stops(windows: Sequence[Sequence[float]], **more: float) -> list[int]:
    """The windows, from 1, after which the run may end."""
    found = verdicts(windows, **more)  # pyright: ignore[reportArgumentType]
    return [number for number, each in enumerate(found, start=1) if each and each.may_stop]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_is_named_once_after_four_windows_in_a_row(num_ranks: int, slow: int) -> None:
    seconds = [0.3 if rank == slow else 0.1 for rank in range(num_ranks)]
    assert news([seconds] * 7) == [None, None, None, slow, None, None, None]
    found = verdicts([seconds] * 4)[3]
    assert found is not None
    assert (found.host, found.seconds, found.usual_seconds) == (f"host-{slow}", 0.3, 0.1)
    assert found.waited_seconds == pytest.approx(4 * 20 * 0.2) and found.waited_share == pytest.approx(0.4)
    assert f"rank {slow} (host host-{slow}) is slow" in found.describe()
    assert "3.0 times" in found.describe() and "16.0 s" in found.describe() and "40%" in found.describe()


def test_a_run_ends_for_twice_the_windows_and_ten_times_the_seconds() -> None:
    assert stops([[0.1, 0.3]] * 10) == [8, 9, 10]  # 4 s a window
    assert stops([[0.1, 0.21]] * 12) == [10, 11, 12]  # 2.2 s a window: 20 s after ten of them
    assert news([[0.1, 0.21]] * 12).index(1) == 3


def test_what_a_run_showed_right_after_an_evaluation_is_not_slow() -> None:
    quiet, after = [0.007, 0.007], [0.021, 0.007]  # s, of 14 micro-batches in 7 steps
    for windows in ([quiet, after, after, quiet], [after] * 4):
        assert news(windows, micro_batches=14, seconds=7 * 0.05) == [None] * 4
        assert stops(windows, micro_batches=14, seconds=7 * 0.05) == []


def test_an_interruption_begins_the_row_anew() -> None:
    quiet, slow = [0.1, 0.1, 0.1], [0.1, 0.1, 0.5]
    assert news([slow, slow, slow, quiet] * 3) == [None] * 12
    assert news([slow] * 4 + [quiet] + [slow] * 5) == [None, None, None, 2, None, None, None, None, 2, None]


def test_a_window_without_measurements_neither_counts_nor_ends_the_row() -> None:
    slow, nothing = [0.1, 0.3], [0.0, 0.3]
    assert news([slow, slow, nothing, slow, nothing, slow]) == [None] * 5 + [1]
    assert verdicts([nothing]) == [None]


def test_a_rank_that_is_excused_is_not_judged_but_still_compared_with() -> None:
    assert news([[0.5, 0.1, 0.1]] * 6, excused=[0]) == [None] * 6  # pyright: ignore[reportArgumentType]
    assert news([[0.2, 0.5]] * 4, excused=[0])[3] == 1  # pyright: ignore[reportArgumentType]


def test_each_of_two_slow_ranks_is_told() -> None:
    assert news([[0.1, 0.1, 0.1, 0.4, 0.1, 0.3]] * 6) == [None, None, None, 3, 5, None]
    assert news([[0.1, 0.1, 0.4, 0.1]] * 10 + [[0.1, 0.1, 0.4, 0.3]] * 4)[-1] == 3  # when one may be stopped for


def test_the_factor_decides() -> None:
    assert news([[0.1, 0.19]] * 6) == [None] * 6
    assert news([[0.1, 0.19]] * 4, factor=1.8)[3] == 1


def test_what_costs_milliseconds_or_a_hundredth_of_the_time_is_not_told() -> None:
    assert news([[0.001, 0.004]] * 20) == [None] * 20  # 1.2 s of 200
    assert news([[0.001, 0.040]] * 20) == [None] * 20  # 0.78 s of each 10: 8 %
    assert [each.ratio for each in verdicts([[0.001, 0.004]]) if each] == pytest.approx([4.0])  # the metric shows it


def test_the_seconds_of_the_recipe_decide() -> None:
    windows = [[0.001, 0.004]] * 40  # 0.06 s of each 0.2
    assert news(windows, seconds=0.2).index(1) == 33  # the first with 2 s behind it
    assert news(windows, seconds=0.2, least_seconds=0.1).index(1) == 3
    assert stops(windows, seconds=0.2, least_seconds=0.1)[0] == 17


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
    """A clock that continues when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("shardvit.pipeline.ranks.phases.time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr("shardvit.pipeline.ranks.phases.platform", SimpleNamespace(node=lambda: "host-0"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_phases(**more: Any) -> Phases:
    watch = SimpleNamespace(progress=lambda step, *, status: None)
    return Phases(**{"watch": watch, "device": torch.device("cpu"), "factor": 2.0, "least_seconds": 2.0, **more})


def phase(phases: Phases, clock: Clock, name: Any, seconds: float) -> None:
    with phases(name, step=0):
        clock.now += seconds


def step(phases: Phases, clock: Clock, *, own_seconds: float, micro_batches: int = 1) -> None:
    """An optimizer step of a second for each micro-batch beside this rank's own part."""
    for _ in range(micro_batches):
        phase(phases, clock, "reading", own_seconds / 4)
        phase(phases, clock, "forward", own_seconds * 3 / 4)
        phase(phases, clock, "backward", 0.75)
        clock.now += 0.25  # the loop itself
    phase(phases, clock, "step", 0.0)


def test_own_seconds_are_the_means_of_reading_and_computing_in_this_window(clock: Clock) -> None:
    phases, ranks = make_phases(), Chorus((1, 1, 1, 0))
    step(phases, clock, own_seconds=100)  # the first one: kernels are chosen, memory is taken
    for own_seconds in (1, 3):
        step(phases, clock, own_seconds=own_seconds, micro_batches=2)
    phases.slowest(ranks)  # pyright: ignore[reportArgumentType]
    step(phases, clock, own_seconds=0.5)
    phases.slowest(ranks)  # pyright: ignore[reportArgumentType]
    assert ranks.sent == [
        {"own_seconds": 2, "micro_batches": 4, "seconds": 4 + 2 * 4, "draws": 0},
        {"own_seconds": 0.5, "micro_batches": 1, "seconds": 1.5, "draws": 0},
    ]


@pytest.mark.parametrize("aside", ["evaluating", "saving", "told"])
def test_the_step_after_an_evaluation_or_a_save_does_not_count(aside: str, clock: Clock) -> None:
    phases, ranks = make_phases(), Chorus((1, 1, 1, 0))
    for _ in range(3):
        step(phases, clock, own_seconds=1)
    if aside == "told":  # a checkpoint is written beside the next step
        phases.disturbed()
    else:
        phase(phases, clock, aside, 1000)
    step(phases, clock, own_seconds=500)
    step(phases, clock, own_seconds=1)
    phases.slowest(ranks)  # pyright: ignore[reportArgumentType]
    assert ranks.sent == [{"own_seconds": 1, "micro_batches": 3, "seconds": 6, "draws": 0}]


def test_a_window_in_which_no_step_counts_says_nothing(clock: Clock) -> None:
    phases, ranks = make_phases(), Chorus((1, 1, 1, 0))
    step(phases, clock, own_seconds=1)
    assert phases.slowest(ranks) is None  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("drawing", [True, False])
def test_a_rank_is_excused_while_pictures_are_drawn_beside_it(drawing: bool, clock: Clock) -> None:
    drawn = [0.0]
    phases, ranks = make_phases(drawing_seconds=lambda: drawn[0]), Chorus((0.1, 2, 4, 0), (0.1, 2, 4, 0))
    told: list[bool] = []
    for _ in range(6):
        for _ in range(2):
            step(phases, clock, own_seconds=1)
        drawn[0] += 0.01 * drawing
        found = phases.slowest(ranks)  # pyright: ignore[reportArgumentType]
        told.append(found is not None and found.is_news)
    assert [each["draws"] for each in ranks.sent] == [float(drawing)] * 6
    assert any(told) != drawing


def test_a_single_process_gives_no_verdict(clock: Clock) -> None:
    phases = make_phases()
    for _ in range(2):
        step(phases, clock, own_seconds=1)
    assert phases.slowest(Chorus()) is None  # pyright: ignore[reportArgumentType]


def test_a_forward_pass_that_waits_for_others_does_not_count(clock: Clock) -> None:
    phases, ranks = make_phases(forward="shared"), Chorus((1, 1, 1, 0))
    for _ in range(2):
        step(phases, clock, own_seconds=1)
    phases.slowest(ranks)  # pyright: ignore[reportArgumentType]
    assert ranks.sent[0]["own_seconds"] == 0.25  # reading alone


@pytest.mark.gpu
def test_the_forward_pass_on_a_gpu_is_measured_on_the_gpu() -> None:
    device = torch.device("cuda")
    phases = make_phases(device=device)
    matrix = torch.randn(4096, 4096, device=device)
    with phases("step", step=0):  # the first one does not count
        pass
    for _ in range(3):
        with phases("forward", step=1):
            for _ in range(50):
                matrix = matrix @ matrix / 4096
    assert phases._own_seconds() > 1e-3
