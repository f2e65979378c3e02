"""Losses between two points of the curve: the same bits, however the steps are taken together. Loss spikes: found where
they are, and next to none where curves merely fall and scatter."""

import json
import math
import random

import pytest
import torch

from shardvit.pipeline.report.losses import LossWindow, Spike, SpikeFinder, StepMeans


def curve(steps: int, *, kind: str = "power", scatter: float = 0.05, seed: int = 0) -> list[float]:
    """An ordinary curve: falling, with a scatter that is a share of the loss, skewed as small losses are."""
    draw = random.Random(seed)
    base = {
        "power": lambda step: 7 * (1 + step) ** -0.3,
        "plateau": lambda step: 0.3 + 6 * math.exp(-step / 300),
        "to zero": lambda step: 6 * math.exp(-step / 500) + 1e-3,
    }[kind]
    return [base(step) * math.exp(scatter * draw.gauss(0, 1)) for step in range(steps)]


def spikes_of(losses: list[float]) -> list[Spike]:
    return SpikeFinder().look(dict(enumerate(losses, start=1)))


@pytest.mark.parametrize("kind", ["power", "plateau", "to zero"])
@pytest.mark.parametrize("scatter", [0.0, 0.01, 0.05, 0.2, 0.5, 1.0])
def test_an_ordinary_falling_curve_raises_no_alarm(kind, scatter):
    assert spikes_of(curve(10_000, kind=kind, scatter=scatter)) == []


@pytest.mark.parametrize("kind", ["power", "plateau", "to zero"])
@pytest.mark.parametrize(("scatter", "jump"), [(0.01, 2.0), (0.05, 2.0), (0.2, 4.0), (0.5, 15.0)])
def test_a_spike_is_found_at_its_step_and_alone(kind, scatter, jump):
    losses = curve(3000, kind=kind, scatter=scatter)
    losses[1999] *= jump
    (spike,) = spikes_of(losses)
    assert (spike.step, spike.loss) == (2000, losses[1999])
    assert spike.loss > spike.mean + 6 * spike.sigma
    assert spike.describe().startswith("step 2000: the loss jumps to ")


def test_six_standard_deviations_of_the_last_128_are_the_limit():
    before = [2.0 + 0.1 * (-1) ** step for step in range(500)]
    sigma = 0.1 * math.sqrt(128 / 127)
    assert spikes_of([*before, 2.0 + 5.99 * sigma]) == []
    (spike,) = spikes_of([*before, 2.0 + 6.01 * sigma])
    assert (spike.step, spike.mean, spike.sigma) == (501, pytest.approx(2.0), pytest.approx(sigma))


@pytest.mark.parametrize("sigmas", [1.0, 3.0, 6.0, 10.0])
def test_a_recipe_may_ask_for_another_number_of_standard_deviations(sigmas: float):
    before = dict(enumerate([2.0 + 0.1 * (-1) ** step for step in range(500)]))
    sigma = 0.1 * math.sqrt(128 / 127)
    for times, found in ((0.99, 0), (1.05, 1)):
        finder = SpikeFinder(sigmas=sigmas)
        finder.look(before)
        assert len(finder.look({500: 2.0 + times * sigmas * sigma})) == found


CASES = {
    "losses older than 128 steps do not count": ([*[50.0, 1.0] * 300, *[1.0, 1.01] * 64, 2.0], 1),
    "64 losses are enough": ([*[1.0, 1.1] * 32, 100.0], 1),
    "63 are too few": ([*[1.0, 1.1] * 31, 1.0, 100.0], 0),
    "the first": ([100.0], 0),
    "a fall": ([*curve(500, scatter=0.01), 1e-6], 0),
    "losses that did not move and hardly do": ([*[2.0] * 200, 2.0001], 0),
    "losses that did not move and do": ([*[2.0] * 200, 2.1], 1),
    "zeros": ([0.0] * 200, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_a_spike_depends_on_the_history(case: str):
    losses, found = CASES[case]
    assert len(spikes_of(losses)) == found


@pytest.mark.parametrize("loss", [math.inf, math.nan, -math.inf])
def test_a_loss_that_is_not_finite_is_a_spike_and_leaves_no_trace(loss):
    (first,) = SpikeFinder().look({1: loss})  # also as the very first
    assert first.step == 1
    losses = curve(500)
    disturbed = SpikeFinder()
    spikes = disturbed.look(dict(enumerate([*losses[:200], loss, loss, *losses[200:]], start=1)))
    assert [spike.step for spike in spikes] == [201, 202]
    assert str(loss) in spikes[0].describe()
    undisturbed = SpikeFinder()
    undisturbed.look(dict(enumerate(losses, start=1)))
    assert disturbed.recent_losses == undisturbed.recent_losses


def test_an_enormous_spike_does_not_hide_the_next():
    losses = curve(500, scatter=0.01)
    losses[300] = 1e300
    losses[320] *= 10
    assert [spike.step for spike in spikes_of(losses)] == [301, 321]


def test_a_new_level_is_told_of_a_few_times_only():
    losses = [*curve(500, kind="plateau", scatter=0.01), *[5 + 0.1 * (-1) ** step for step in range(300)]]
    spikes = spikes_of(losses)
    assert spikes[0].step == 501
    assert len(spikes) <= 10


def test_looking_in_pieces_and_carrying_the_history_over_changes_nothing():
    losses = curve(700, scatter=0.02)
    losses[400] *= 3
    losses[401] = math.nan
    losses[650] *= 3
    whole, recent = spikes_of(losses), []
    found = []
    for start in range(0, 700, 37):
        finder = SpikeFinder(json.loads(json.dumps(recent)))
        part = losses[start : start + 37]
        found += finder.look(dict(enumerate(part, start=start + 1)))
        recent = finder.recent_losses
        assert len(recent) <= 128 and all(map(math.isfinite, recent))
    assert [spike.step for spike in whole] == [401, 402, 651]
    assert str(found) == str(whole)


class Chorus:
    """Stands in for `Ranks`: every rank reports what this one does, times its own number."""

    def __init__(self, num_ranks: int) -> None:
        self.factors = torch.rand(num_ranks, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        assert values.dtype == torch.float64
        return (values * self.factors).contiguous()


NOTHING = StepMeans([], [])


def steps(num_steps: int, *, micro: int = 2) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.rand((), generator=generator) for _ in range(micro)] for _ in range(num_steps)]


def play(
    window: LossWindow, played: list[list[torch.Tensor]], ranks: Chorus, *, reduce_after: set[int]
) -> tuple[list[float], float]:
    """Every step's loss, and the mean of them; scores are the losses' halves."""
    for number, losses in enumerate(played):
        for loss in losses:
            window.add(loss, loss / 2)
        window.end_step()
        if number in reduce_after:
            window.reduce(ranks)
    means = window.reduce(ranks)
    assert window.take(ranks) == means and window.reduce(ranks) == NOTHING
    assert means.scores == [loss / 2 for loss in means.losses]
    return means.losses, sum(means.losses) / len(means.losses)


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
                first.add(loss, loss / 2)
            first.end_step()
        carried = first.reduce(ranks)
        assert len(carried.losses) == len(carried.scores) == cut
        assert play(LossWindow(carried.losses, carried.scores), played[cut:], ranks, reduce_after=set()) == whole


def test_the_mean_is_over_micro_batches_ranks_and_steps():
    ranks = Chorus(3)
    played = steps(4)
    mean = torch.tensor(played, dtype=torch.float64).mean().item() * ranks.factors.mean().item()
    assert play(LossWindow([]), played, ranks, reduce_after=set())[1] == pytest.approx(mean, rel=1e-12)


def test_taking_the_mean_empties_the_window_and_carried_losses_count():
    ranks = Chorus(1)
    ranks.factors[:] = 1.0
    carried = [4.0, 8.0]
    window = LossWindow(carried, [2.0, 4.0])
    assert play(window, [[torch.tensor(3.0)]], ranks, reduce_after=set()) == ([4.0, 8.0, 3.0], 5.0)
    assert carried == [4.0, 8.0]  # the caller's list is not written to
    assert window.reduce(ranks) == NOTHING
    assert play(window, [[torch.tensor(1.0)], [torch.tensor(2.0)]], ranks, reduce_after={0}) == ([1.0, 2.0], 1.5)


def test_the_graph_is_let_go():
    weight = torch.ones((), requires_grad=True)
    window = LossWindow([])
    window.add(weight * 2, weight)
    window.end_step()
    ranks = Chorus(1)
    ranks.factors[:] = 1.0
    assert window.reduce(ranks) == StepMeans([2.0], [1.0])


def test_scores_that_an_older_checkpoint_lacks_are_not_known():
    window = LossWindow([4.0, 8.0])
    window.pass_over(device=torch.device("cpu"))
    ranks = Chorus(1)
    ranks.factors[:] = 1.0
    means = window.take(ranks)
    assert means.losses[:2] == [4.0, 8.0] and len(means.losses) == 3
    assert len(means.scores) == 3 and all(map(math.isnan, means.scores))
