"""Describe the result of a finished stage, behind "done" on the screen. Costs one read of its record."""

from __future__ import annotations

from pipeline.recipe.vocabulary import StageName
from pipeline.report.best import AVERAGES_SCORES, SCORES, describe_best, show_score
from pipeline.runs.run_folder import RunFolder


def describe_results(folder: RunFolder, *, stage: StageName) -> str:
    """Its score, and where it was better before; "" for swap_head."""
    record = folder.peek(stage)
    for key in SCORES:
        if key in record.results:
            best = describe_best(record.results, stage=stage, checkpoints=folder.checkpoints(stage))
            average = "".join(
                f", {show_score(record.results, other)} with the moving average of the weights"
                for other in AVERAGES_SCORES
                if other in record.results
            )
            last = f", held-out {show_score(record.results, key)}{average} after {record.images_seen:,} images"
            return f"{last}; {best}" if best else last
    return ""
