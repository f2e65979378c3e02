"""Keep each step's loss and score on the device between points of the curve, and detect loss spikes.

No step waits for a number. Ranks are added in order in float64, so that the curve does not depend on how many steps are
reduced together: a resumed run gives the same bits.

Spikes follow OLMo-core's SkipStepOptimizer (src/olmo_core/optim/skip_step_optimizer.py): more than 6 standard
deviations from the mean of the last 128 losses, once there are 64. Here only rises count, and they must exceed 4.5
deviations of the log losses too: losses near zero are skewed, and the first rule alone reports every thousandth step of
a run whose losses scatter by half. A non-finite loss is always a spike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from shardvit.pipeline.ranks.group import Ranks

_HISTORY_STEPS, _LEAST_STEPS = 128, 64  # OLMo-core's
SIGMAS = 6.0  # OLMo-core's
_LOG_SIGMAS = 4.5
_SMALLEST_SIGMA = 1e-4  # relative to the mean: after flat losses, not every rise is a spike
_CUT = 4  # times the limit: clips spikes in the history; 1e30 would hide all others for 128 steps


@dataclass(frozen=True)
class StepMeans:
    """Means over micro-batches and ranks for each step of a window; NaN for a skipped step."""

    losses: list[float]
    scores: list[float]  # of each step one after the other, if it has several


class LossWindow:
    """Losses and scores since the last point of the curve; a checkpoint's `scores` may be missing."""

    def __init__(self, losses: Sequence[float], scores: Sequence[float] = (), *, scores_per_step: int = 1) -> None:
        missing = [math.nan] * (len(losses) * scores_per_step - len(scores))
        self._global = StepMeans(list(losses), [*missing, *scores])
        self._scores_per_step = scores_per_step
        self._local: list[tuple[torch.Tensor, ...]] = []  # each has a loss, then scores
        self._micro: list[tuple[torch.Tensor, ...]] = []

    def add(self, loss: torch.Tensor, score: torch.Tensor) -> None:
        """Add a micro-batch's loss and score, both 0-dimensional; [scores_per_step] if there are several."""
        scores = score.detach().double()
        self._micro.append((loss.detach().double(), *(scores if scores.ndim else (scores,))))

    def end_step(self) -> None:
        """Combine the micro-batches added since the last call into one step."""
        self._local.append(tuple(torch.stack(each).mean() for each in zip(*self._micro, strict=True)))
        self._micro.clear()

    def pass_over(self, *, device: torch.device) -> None:
        """Add NaN for a step not done."""
        nothing = torch.full((), math.nan, dtype=torch.float64, device=device)
        self._local.append((nothing,) * (1 + self._scores_per_step))

    def reduce(self, ranks: Ranks) -> StepMeans:
        """Return global means of every step in the window; collective."""
        if self._local:
            losses, *scores = zip(*self._local, strict=True)
            everyone = ranks.gather(torch.stack([*losses, *chain(*zip(*scores, strict=True))]))
            total = everyone[0].clone()
            for row in everyone[1:]:  # .mean(dim=0) adds in an order that depends on the number of steps
                total += row
            means = (total / len(everyone)).tolist()
            self._global.losses.extend(means[: len(losses)])
            self._global.scores.extend(means[len(losses) :])
            self._local.clear()
        return StepMeans(list(self._global.losses), list(self._global.scores))

    def take(self, ranks: Ranks) -> StepMeans:
        """Return the window's global means and empty it; collective."""
        means = self.reduce(ranks)
        self._global = StepMeans([], [])
        return means


@dataclass(frozen=True)
class Spike:
    """Step with a loss far above the preceding ones."""

    step: int
    loss: float
    mean: float  # of the steps before it; NaN without any
    sigma: float

    def describe(self) -> str:
        if not math.isfinite(self.loss):
            return f"step {self.step}: the loss is {self.loss}, it was {self.mean:.4f} before"
        return (
            f"step {self.step}: the loss jumps to {self.loss:.4f}, {(self.loss - self.mean) / self.sigma:.0f} standard "
            f"deviations above the mean of the steps before it, {self.mean:.4f}"
        )


class SpikeFinder:
    """Judge every step's loss once, in order; starts from a checkpoint's global means."""

    def __init__(self, recent_losses: Sequence[float] = (), *, sigmas: float = SIGMAS) -> None:
        self._sigmas = sigmas
        self._recent = list(recent_losses)[-_HISTORY_STEPS:]

    @property
    def recent_losses(self) -> list[float]:
        """State to checkpoint: at most 128 finite floats."""
        return list(self._recent)

    def look(self, losses: Mapping[int, float]) -> list[Spike]:
        spikes: list[Spike] = []
        for step, loss in losses.items():
            mean, sigma = _mean_and_sigma(self._recent)
            is_judged = len(self._recent) >= _LEAST_STEPS
            is_above = is_judged and loss > mean + self._sigmas * sigma and self._stands_out_in_logarithms(loss)
            if is_above or not math.isfinite(loss):
                spikes.append(Spike(step, loss, mean, sigma))
            if math.isfinite(loss):
                entering = min(loss, mean + _CUT * self._sigmas * sigma) if is_judged else loss
                self._recent = [*self._recent[-_HISTORY_STEPS + 1 :], entering]
        return spikes

    def _stands_out_in_logarithms(self, loss: float) -> bool:
        if min(self._recent) <= 0:  # not a cross-entropy
            return True
        mean, sigma = _mean_and_sigma([math.log(each) for each in self._recent])
        # A recipe with a lower limit lowers the one on logarithms as well.
        return math.log(loss) > mean + _LOG_SIGMAS * min(1.0, self._sigmas / SIGMAS) * sigma


def _mean_and_sigma(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (never zero); NaN without values."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    sigma = math.sqrt(math.fsum((each - mean) ** 2 for each in values) / max(1, len(values) - 1))
    return mean, max(sigma, _SMALLEST_SIGMA * abs(mean))
