"""Load what an evaluation's pictures are drawn from: the stored evaluations of a step, with their sets' names.

Reads evaluation.json and arrays.npz of each set: milliseconds, and tenths of a second with 1,000 classes. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

from data_shards.text import one_line
from pipeline.pictures.style import plain
from pipeline.recipe.vocabulary import OWN_SET
from pipeline.runs.evaluations import Evaluation, evaluated_step, evaluations, load_evaluation
from pipeline.runs.pictures import DrawRequest


@dataclass(frozen=True)
class EvaluatedSet:
    """One held-out set's evaluation, and how its pictures are told from another set's."""

    evaluation: Evaluation
    set_name: str

    def name(self, picture: str) -> str:
        """`picture` for the stage's own set, else with the set's name behind it, in the letters of a picture's name."""
        if self.set_name == OWN_SET:
            return picture
        return f"{picture}__{re.sub('[^a-z0-9_]', '_', self.set_name.lower())}"

    def title(self, text: str) -> str:
        return text if self.set_name == OWN_SET else f"{text}, set {one_line(self.set_name)}"


def of_each_set(draw: Callable[[DrawRequest, EvaluatedSet], None]) -> Callable[[DrawRequest], None]:
    """A drawer that calls `draw` with each evaluation of the request's step that is still kept, the stage's own set
    first. One that cannot be read or drawn (ValueError, OSError) is told after the others have been drawn."""

    @wraps(draw)
    def drawer(request: DrawRequest) -> None:
        failed: list[Exception] = []
        kept = evaluations(request.stage_folder)
        for set_name in sorted(kept, key=lambda name: (name != OWN_SET, name)):
            for folder in kept[set_name]:
                if evaluated_step(folder) == request.step:
                    try:
                        draw(request, EvaluatedSet(load_evaluation(folder), set_name))
                    except (ValueError, OSError) as error:
                        failed.append(error)
        if failed:
            raise failed[0]

    return drawer


def brief(name: str) -> str:
    """A class's name for an alternative text."""
    return plain(name, longest=30)


def percent(share: float) -> str:
    """A share of 1 as "61.2 %", "-" for NaN; a small one is not shown as 0."""
    if not math.isfinite(share):
        return "-"
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"
