"""Record and describe a stage's best evaluation, if it was not the last: results under "best/..."."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.logs import MetricRow
from shardvit.pipeline.runs.run_folder import FOLDER_PREFIX, RunFolder

SCORES = {"val/top1": "top-1", "val/accuracy": "accuracy"}  # on the screen
AVERAGES_SCORES = {"val/ema_top1": "top-1", "val/ema_accuracy": "accuracy"}  # of the averaged weights
_NAMES = SCORES | {"val/loss": "loss"}
_NAMES |= {key.replace("/", "/ema_"): f"{name} of the moving average" for key, name in _NAMES.items()}
_STEP = "best/step"


def show_score(results: Mapping[str, float], key: str) -> str:
    """Format score `key` with known baselines: "top-1 0.6141 (balanced accuracy 0.5000, commonest class 0.6140)"."""
    group, _, metric = key.partition("/")
    beside = {
        "balanced accuracy": f"{key.removesuffix('top1')}balanced_accuracy",
        "commonest class": f"{group}/commonest_class_share",
    }
    known = ", ".join(f"{name} {results[each]:.4f}" for name, each in beside.items() if each in results)
    name = _NAMES[f"val/{metric.removeprefix('ema_')}"]
    return f"{name} {results[key]:.4f}" + (f" ({known})" if known else "")


def best_results(rows: Iterable[MetricRow], *, last: Mapping[str, float], by: str) -> dict[str, float]:
    """Return step and value of the best evaluation by metric `by`; empty if none beats the last."""
    sign = -1.0 if by.endswith("loss") else 1.0
    known = [(row.metrics[by], row.step) for row in rows if not math.isnan(row.metrics.get(by, math.nan))]
    if not known:
        return {}
    value, step = max(known, key=lambda found: (sign * found[0], found[1]))
    if sign * value <= sign * last.get(by, math.nan):
        return {}
    return {_STEP: float(step), f"best/{by}": value}


def describe_best(results: Mapping[str, float], *, stage: str, checkpoints: Path) -> str:
    """Describe the best evaluation and how to keep its weights; empty if it was the last one."""
    key = next((key.removeprefix("best/") for key in results if key.startswith("best/val/")), None)
    if key is None or _STEP not in results:
        return ""
    step, what, name = int(results[_STEP]), "loss" if key.endswith("loss") else "score", key.partition("/")[2]
    what, name = (what, _NAMES[key]) if key in _NAMES else (name.removeprefix("ema_"), name)
    folder = checkpoints / f"{FOLDER_PREFIX}{step:08d}"
    kept = f"keep_best: {what} in stages.{stage} keeps its checkpoint, from --restart {stage} on"
    if folder.is_dir():
        kept = f"its checkpoint is {folder}"
    return f"the best held-out {name} was {results[f'best/{key}']:.4f} after step {step:,}: {kept}"


def describe_results(folder: RunFolder, *, stage: StageName) -> str:
    """Describe a finished stage's final and best scores, for the "done" line; "" for swap_head."""
    record = folder.peek(stage)
    for key in (*SCORES, "val/loss"):  # a masked autoencoder has no other score
        if key in record.results:
            shown = f", held-out {show_score(record.results, key)}"
            averages = AVERAGES_SCORES if key in SCORES else ("val/ema_loss",)
            for other in (other for other in averages if other in record.results):
                shown += f", {show_score(record.results, other)} with the moving average of the weights"
            best = describe_best(record.results, stage=stage, checkpoints=folder.checkpoints(stage))
            return f"{shown} after {record.images_seen:,} images" + (f"; {best}" if best else "")
    return ""
