"""Losses between two points of the curve: the same bits, however the steps are taken together."""

import random

import pytest
import torch

from pipeline.report.loss_window import LossWindow


class Chorus:
    """Stands in for `Ranks`: every rank reports what this one does, times its own number."""

    def __init__(self, num_ranks: int) -> None:
        self.factors = torch.rand(num_ranks, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        assert values.dtype == torch.float64
        return (values * self.factors).contiguous()


def steps(num_steps: int, *, micro: int = 2) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.rand((), generator=generator) for _ in range(micro)] for _ in range(num_steps)]


def play(
    window: LossWindow, played: list[list[torch.Tensor]], ranks: Chorus, *, reduce_after: set[int]
) -> tuple[list[float], float]:
    """Every step's loss, and the mean of them."""
    for number, losses in enumerate(played):
        for loss in losses:
            window.add(loss)
        window.end_step()
        if number in reduce_after:
            window.reduce(ranks)
    losses = window.reduce(ranks)
    assert window.take(ranks) == losses and window.reduce(ranks) == []
    return losses, sum(losses) / len(losses)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_steps", [1, 5, 20, 37])
def test_reduced_in_pieces_is_reduced_at_once_bit_for_bit(num_ranks: int, num_steps: int):
    ranks, played, draw = Chorus(num_ranks), steps(num_steps), random.Random(num_ranks)
    whole = play(LossWindow([]), played, ranks, reduce_after=set())
    for _ in range(8):
        cuts = {n for n in range(num_steps) if draw.random() < 0.3}
        assert play(LossWindow([]), played, ranks, reduce_after=cuts) == whole
    # Interrupted, saved, and taken up again by a new process.
    for cut in range(1, num_steps):
        first = LossWindow([])
        for losses in played[:cut]:
            for loss in losses:
                first.add(loss)
            first.end_step()
        carried = first.reduce(ranks)
        assert len(carried) == cut
        assert play(LossWindow(carried), played[cut:], ranks, reduce_after=set()) == whole


def test_the_mean_is_over_micro_batches_ranks_and_steps():
    ranks = Chorus(3)
    played = steps(4)
    mean = torch.tensor(played, dtype=torch.float64).mean().item() * ranks.factors.mean().item()
    assert play(LossWindow([]), played, ranks, reduce_after=set())[1] == pytest.approx(mean, rel=1e-12)


def test_taking_the_mean_empties_the_window_and_carried_losses_count():
    ranks = Chorus(1)
    ranks.factors[:] = 1.0
    carried = [4.0, 8.0]
    window = LossWindow(carried)
    assert play(window, [[torch.tensor(3.0)]], ranks, reduce_after=set()) == ([4.0, 8.0, 3.0], 5.0)
    assert carried == [4.0, 8.0]  # the caller's list is not written to
    assert window.reduce(ranks) == []
    assert play(window, [[torch.tensor(1.0)], [torch.tensor(2.0)]], ranks, reduce_after={0}) == ([1.0, 2.0], 1.5)


def test_the_graph_is_let_go():
    weight = torch.ones((), requires_grad=True)
    window = LossWindow([])
    window.add(weight * 2)
    window.end_step()
    ranks = Chorus(1)
    ranks.factors[:] = 1.0
    assert window.reduce(ranks) == [2.0]
