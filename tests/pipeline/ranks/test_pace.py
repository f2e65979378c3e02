"""Slow ranks: named when they are slow for long enough, and nobody is named for noise."""

import time
from types import SimpleNamespace

import pytest
import torch

from pipeline.ranks.pace import Pace
from pipeline.ranks.place import Place


class Chorus:
    """Stands in for `Ranks`: the other ranks report what the test says."""

    def __init__(self, num_ranks: int) -> None:
        self.place = Place(rank=0, world_size=num_ranks)
        self.seconds = [0.1] * num_ranks

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        assert values.shape == (1,)
        return torch.tensor(self.seconds, dtype=torch.float64)[:, None]

    def gather_objects(self, value: object) -> list[object]:
        return [f"host-{rank}" for rank in range(self.place.world_size)]


def make_pace(factor: float = 2.0) -> Pace:
    return Pace(host="host-0", device=torch.device("cpu"), factor=factor)


def verdicts(windows: list[list[float]], *, factor: float = 2.0):
    """What is said after each window, in which the ranks took so many seconds."""
    pace, ranks = make_pace(factor), Chorus(len(windows[0]))
    found = []
    for seconds in windows:
        ranks.seconds = seconds
        found.append(pace.compare(ranks))
    return found


def news(windows: list[list[float]], *, factor: float = 2.0) -> list[int | None]:
    return [verdict.rank if verdict.is_news else None for verdict in verdicts(windows, factor=factor)]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_slow_in_two_windows_is_named_once(num_ranks, slow):
    seconds = [0.3 if rank == slow else 0.1 for rank in range(num_ranks)]
    assert news([seconds] * 4) == [None, slow, None, None]
    verdict = verdicts([seconds] * 2)[1]
    assert (verdict.host, verdict.seconds, verdict.usual_seconds, verdict.windows) == (f"host-{slow}", 0.3, 0.1, 2)
    assert verdict.ratio == pytest.approx(3)
    assert f"rank {slow} (host host-{slow}) is slow" in verdict.describe() and "3.0 times" in verdict.describe()


def test_one_slow_window_is_not_told():
    quiet, slow = [0.1, 0.1, 0.1], [0.1, 0.1, 0.5]
    assert news([quiet, slow, quiet, slow, quiet]) == [None] * 5


def test_a_rank_that_has_recovered_is_told_of_again():
    quiet, slow = [0.1, 0.1], [0.1, 0.5]
    assert news([slow, slow, quiet, slow, slow, slow]) == [None, 1, None, None, 1, None]


def test_each_of_two_slow_ranks_is_told():
    assert news([[0.1, 0.1, 0.1, 0.4, 0.1, 0.3]] * 4) == [None, 3, 5, None]
    assert news([[0.1] * 4 + [0.4, 0.3], [0.1] * 4 + [0.3, 0.4], [0.1] * 4 + [0.4, 0.3]]) == [None, 5, 4]


def test_the_factor_decides():
    assert news([[0.1, 0.19]] * 3) == [None] * 3
    assert news([[0.1, 0.19]] * 3, factor=1.8) == [None, 1, None]


def test_a_difference_of_a_few_milliseconds_is_noise():
    assert news([[0.001, 0.004]] * 3) == [None] * 3
    assert verdicts([[0.001, 0.004]])[0].ratio == pytest.approx(4)  # the metric still shows it


def test_a_single_process_and_a_window_without_measurements_give_no_verdict():
    assert verdicts([[0.1]]) == [None]
    assert verdicts([[0.0, 0.1]]) == [None]


def test_own_seconds_are_the_means_of_reading_and_computing_in_this_window(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0, 30.0, 34.0, 50.0, 50.5])
    monkeypatch.setattr("pipeline.ranks.pace.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    sent = []

    class Listening(Chorus):
        def gather(self, values: torch.Tensor) -> torch.Tensor:
            sent.append(values.item())
            return super().gather(values)

    pace, ranks = make_pace(), Listening(2)
    for _ in range(2):
        with pace.measuring("reading"):
            pass
        with pace.measuring("forward"):
            pass
    pace.compare(ranks)
    with pace.measuring("forward"):
        pass
    pace.compare(ranks)
    assert sent == [2 + 3, 0.5]


def test_a_forward_pass_that_waits_for_others_does_not_count():
    pace, ranks = Pace(host="h", device=torch.device("cpu"), factor=2.0, forward="shared"), Chorus(2)
    sent: list[float] = []
    ranks.gather = lambda values: sent.append(values.item()) or torch.tensor([[1.0], [1.0]])  # pyright: ignore[reportAttributeAccessIssue]
    with pace.measuring("forward"):
        time.sleep(0.01)
    pace.compare(ranks)  # pyright: ignore[reportArgumentType]
    assert sent == [0.0]


@pytest.mark.gpu
def test_the_forward_pass_on_a_gpu_is_measured_on_the_gpu():
    pace, matrix = Pace(host="h", device=torch.device("cuda"), factor=2.0), torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        with pace.measuring("forward"):
            for _ in range(50):
                matrix = matrix @ matrix / 4096
    assert pace._own_seconds() > 1e-3
