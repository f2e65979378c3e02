"""Small recipes on a few digits for the tests of this folder, and what their runs leave to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from data_shards.packing.pack import pack
from pipeline.runs.logs import read_metrics

ADAMW = {"name": "adamw", "lr": 0.003}


def pack_digits(out: Path, classes: str = "0123456789", **options: Any) -> Path:
    """Pack these digits, one in five held out."""
    pack("digits", out, classes=tuple(classes), report=lambda line: None, **{"holdout": 0.2, **options})
    return out


def stage(shards: Path | str, duration: str, **keys: Any) -> dict[str, Any]:
    """A stage on packed shards, at 8 px and 16 images a step unless `keys` say otherwise."""
    sets = {"train": f"{shards}/train", "eval": f"{shards}/val"}
    return {**sets, "image_size": 8, "global_batch_size": 16, "duration": duration, "optimizer": ADAMW, **keys}


def write_recipe(folder: Path, stages: dict[str, Any], *, name: str, file: str = "recipe.yaml", **keys: Any) -> None:
    """Write a recipe of one process and a ViT of width 16 in float32, unless `keys` say otherwise."""
    model = {"width": 16, "depth": 1, "heads": 2, "patch_size": 4}
    content = {"name": name, "processes": 1, "model": model, "engine": {"precision": "fp32"}, "stages": stages, **keys}
    (folder / file).write_text(yaml.safe_dump(content))


def curve(stage_folder: Path) -> list[tuple[int, dict[str, float]]]:
    """All that was logged but speeds and times."""
    return [
        (row.step, {name: value for name, value in row.metrics.items() if not name.startswith("perf/")})
        for row in read_metrics(stage_folder / "metrics.jsonl")
    ]
