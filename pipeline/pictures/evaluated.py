"""Load a step's stored evaluations for drawing; name sets, shorten classes, format shares.

Reads evaluation.json and arrays.npz of each set: milliseconds, tenths of a second with 1,000 classes. No torch.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps

from shardvit.data_shards.text import one_line
from shardvit.pipeline.pictures.style import Drawn, plain
from shardvit.pipeline.recipe.vocabulary import OWN_SET
from shardvit.pipeline.runs.evaluations import Evaluation, evaluated_step, evaluations, load_evaluation
from shardvit.pipeline.runs.pictures import DrawRequest, Picture


@dataclass(frozen=True)
class EvaluatedSet:
    """Evaluation of one held-out set."""

    evaluation: Evaluation
    set_name: str

    def picture(self, name: str, title: str, *, caption: str, alt: str) -> Picture:
        """Make a picture's texts; name and title include the set, unless it is the stage's own."""
        if self.set_name != OWN_SET:
            name = f"{name}__{re.sub('[^a-z0-9_]', '_', self.set_name.lower())}"
            title = f"{title}, set {one_line(self.set_name)}"
        return Picture(name, title, caption, alt, "evaluation")


def of_each_set(
    draw: Callable[[DrawRequest, EvaluatedSet], Drawn | None],
) -> Callable[[DrawRequest], Iterator[Drawn]]:
    """Turn `draw` into a drawer of all stored evaluations of the request's step, the stage's own set first.

    A ValueError or OSError from one set is raised after the other sets.
    """

    @wraps(draw)
    def drawer(request: DrawRequest) -> Iterator[Drawn]:
        failed: list[Exception] = []
        kept = evaluations(request.stage_folder)
        for set_name in sorted(kept, key=lambda name: (name != OWN_SET, name)):
            for folder in kept[set_name]:
                if evaluated_step(folder) == request.step:
                    try:
                        drawn = draw(request, EvaluatedSet(load_evaluation(folder), set_name))
                    except (ValueError, OSError) as error:
                        failed.append(error)
                        continue
                    if drawn is not None:
                        yield drawn
        if failed:
            raise failed[0]

    return drawer


def brief(name: str) -> str:
    """Shorten a class name for alternative text."""
    return plain(name, longest=30)


def percent(share: float) -> str:
    """Format a share as "61.2 %", NaN as "-"; small shares become "< 0.1 %", not 0."""
    if not math.isfinite(share):
        return "-"
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"
