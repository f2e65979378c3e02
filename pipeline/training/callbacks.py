"""The user's own callbacks at the loop's decisions: after a step, after an evaluation, before a checkpoint is saved.

They run on every rank. What they ask for is agreed over the ranks as a signal is, and done two steps later; what they
log is written by rank 0. Their states, and an own task's, are JSON in each checkpoint, so a resume is exact. They wait
for no number of the device: losses and norms are those of the last point of the curve.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.vocabulary import METRICS, StageName

When = Literal["after_step", "after_evaluation", "before_saving"]
What = Literal["stop", "save"]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}")


@dataclass(frozen=True)
class Moment:
    """Where a training stands; the same on every rank but for `rank`."""

    stage: StageName
    step: int  # done so far
    total_steps: int
    images_seen: int
    rank: int
    curve: Mapping[str, float]  # the last point of the training curve: train/loss, opt/lr, opt/grad_norm, ...
    evaluation: Mapping[str, float]  # the last evaluation: val/loss, ...
    model: nn.Module  # to look at, in training mode and the recipe's precision; under ZeRO 3 its weights are cut
    _logged: dict[str, float] = field(default_factory=dict, repr=False)
    _asked: dict[What, str] = field(default_factory=dict, repr=False)

    def log(self, name: str, value: float) -> None:
        """Log a value at this step; ValueError for a name that is taken or no metric's."""
        if not _NAME.fullmatch(name) or name in METRICS or name in self.evaluation:
            raise ValueError(f"log({name!r}): give a name of letters, digits and _ . / - that no other metric has")
        self._logged[name] = float(value)

    def save(self) -> None:
        """Ask for a checkpoint."""
        self._asked["save"] = ""

    def stop(self, why: str) -> None:
        """Ask to save and end the run as a signal does, with exit code 75; the same command resumes."""
        self._asked["stop"] = why


@dataclass(frozen=True)
class Callbacks:
    """A stage's callbacks, and all own code that has a state, by name."""

    called: Mapping[str, Any] = field(default_factory=dict)
    stateful: Mapping[str, Any] = field(default_factory=dict)
    stage: StageName = "pretrain"

    def tell(
        self,
        when: When,
        *,
        log: Callable[[Mapping[str, float]], None],
        ask: Callable[[What, str], None],
        **moment: Any,
    ) -> None:
        """Call those that have this method, and pass on what they log and ask for; `moment`: its other fields."""
        for name, each in self.called.items():
            if (method := getattr(each, when, None)) is None:
                continue
            now = Moment(stage=self.stage, **moment)
            method(now)
            if now._logged:
                log(now._logged)
            for what, why in now._asked.items():
                ask(what, f"{name}: {why}")

    def states(self) -> dict[str, Any]:
        """Return their states; UserError for one that JSON does not hold exactly."""
        found: dict[str, Any] = {}
        for name, each in self.stateful.items():
            state = each.state_dict()
            try:
                kept = json.loads(json.dumps(state))
            except (TypeError, ValueError):
                kept = None
            if repr(kept) != repr(state):
                raise UserError(
                    f"{name}: what state_dict returns is kept as JSON: give numbers, texts, lists, and dicts whose "
                    "keys are texts"
                )
            found[name] = kept
        return found

    def load(self, states: Mapping[str, Any]) -> None:
        """Restore the states of a checkpoint."""
        for name, each in self.stateful.items():
            if name in states:
                each.load_state_dict(states[name])
