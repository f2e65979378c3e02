"""The smallest recipe that trains, as a tree of keys, to which a test adds; and the curve of a run."""

from pathlib import Path
from typing import Any

import yaml

from shardvit.pipeline.runs.logs import read_metrics

SMALL = {"width": 16, "depth": 1, "heads": 2, "patch_size": 4}


def small_stage(shards: Path | str = "shards", **keys: Any) -> dict[str, Any]:
    """A training stage on SHARDS/train and SHARDS/val."""
    return {
        "train": f"{shards}/train",
        "eval": f"{shards}/val",
        "image_size": 8,
        "global_batch_size": 16,
        "duration": "10 steps",
        "optimizer": {"name": "adamw", "lr": 0.003},
        **keys,
    }


def small_recipe(name: str = "r", *, model: dict[str, Any] = SMALL, **keys: Any) -> dict[str, Any]:
    """A recipe of SMALL; stages are keys that end in "_", such as `pretrain_`."""
    stages = {key.removesuffix("_"): value for key, value in keys.items() if key.endswith("_")}
    return {"name": name, "model": model, "stages": stages, **{k: v for k, v in keys.items() if not k.endswith("_")}}


def write_recipe(file: Path, tree: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def curve(stage: Path) -> list[tuple[int, dict[str, float]]]:
    """All that a stage's folder has logged but speeds and times."""
    return [
        (row.step, {name: value for name, value in row.metrics.items() if not name.startswith("perf/")})
        for row in read_metrics(stage / "metrics.jsonl")
    ]
