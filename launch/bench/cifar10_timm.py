"""CIFAR-10 by our pre-training and by timm's train script: same model, images seen and augmentation.

    python -m launch.bench.cifar10_timm IMAGES SHARDS TRAIN_PY OUT --seeds 0 1 2

IMAGES: class folders `train` and `test`; SHARDS: `shardvit pack IMAGES SHARDS`; TRAIN_PY: timm's train.py, which its
package does not contain. What has run already is not run again; `--table` runs nothing. Both sides train two epochs at
24 pixels in batches of 128, in one process, some minutes a run; records/cifar10_timm.txt has what `--table` printed.
What differs: the initialisation and GELU (Google's, timm's), the last 80 images of an epoch (timm drops them), and the
order of the images.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

import yaml

from data_shards.text import table
from pipeline.runs.metrics_log import read_metrics

EPOCHS = 2


def ours(out: Path, *, shards: Path, seed: int) -> list[str]:
    """Our command; the recipe is written into `out`."""
    recipe = {
        "name": "cifar10",
        "processes": 1,
        "model": {"width": 128, "depth": 6, "heads": 4, "patch_size": 4},
        "engine": {"precision": "fp32"},
        "stages": {
            "pretrain": {
                "head": "linear",
                "train": str(shards / "train"),
                "eval": str(shards / "val"),
                "image_size": 24,
                "global_batch_size": 128,
                "duration": f"{EPOCHS} epochs",
                "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.05},
                "schedule": {"warmup": "1 epochs", "decay": "cosine"},
                "augment": {"crop_area": [0.5, 1.0]},
                "label_smoothing": 0.05,
                "eval_every": "1 epochs",
            },
        },
    }
    file = out / "ours.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return ["-m", "launch.cli", "run", str(file), f"name=s{seed}", f"seed={seed}", "--runs", str(out / "ours")]


def theirs(out: Path, *, images: Path, train_py: Path, seed: int) -> list[str]:
    """timm's command."""
    return [
        *(str(train_py), "--data-dir", str(images), "--train-split", "train", "--val-split", "test"),
        *("--model", "vit_tiny_patch16_224", "--num-classes", "10", "--img-size", "24", "--model-kwargs"),
        *("patch_size=4", "embed_dim=128", "depth=6", "num_heads=4", "img_size=24"),
        *("--device", "cpu", "--seed", str(seed), "-b", "128", "-vb", "250", "-j", "1"),
        *("--opt", "adamw", "--lr", "1e-3", "--weight-decay", "0.05", "--clip-grad", "1.0"),
        *("--sched", "cosine", "--sched-on-updates", "--epochs", str(EPOCHS), "--warmup-epochs", "1"),
        *("--warmup-lr", "0", "--min-lr", "0", "--cooldown-epochs", "0", "--smoothing", "0.05"),
        *("--scale", "0.5", "1.0", "--hflip", "0.5", "--color-jitter", "0", "--crop-pct", "1.0"),
        *("--train-interpolation", "bilinear", "--interpolation", "bilinear"),
        *("--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5"),
        *("--output", str(out / "timm"), "--experiment", f"s{seed}"),
    ]


def main() -> None:
    """Run both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("images", "shards", "train_py", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="only print what has run")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in () if given.table else given.seeds:
        for done, command in (
            (_our_curve(given.out, seed), ours(given.out, shards=given.shards, seed=seed)),
            (_their_curve(given.out, seed), theirs(given.out, images=given.images, train_py=given.train_py, seed=seed)),
        ):
            if len(done) < EPOCHS:
                start = time.monotonic()
                subprocess.run([sys.executable, *command], check=True)
                print(f"{command[0]} seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
    rows = [
        (name, str(seed), *(f"{top1:.4f}" for top1 in curve(given.out, seed)))
        for name, curve in (("shardvit", _our_curve), ("timm", _their_curve))
        for seed in given.seeds
    ]
    heading = ("", "seed", *(f"top-1 after epoch {epoch}" for epoch in range(1, EPOCHS + 1)))
    print(table([heading, *rows], heading="ruled"))


def _our_curve(out: Path, seed: int) -> list[float]:
    file = out / "ours" / f"s{seed}" / "pretrain" / "metrics.jsonl"
    if not file.exists():
        return []
    return [row.metrics["val/top1"] for row in read_metrics(file) if "val/top1" in row.metrics]


def _their_curve(out: Path, seed: int) -> list[float]:
    file = out / "timm" / f"s{seed}" / "summary.csv"
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as lines:
        return [float(row["eval_top1"]) / 100 for row in csv.DictReader(lines)]


if __name__ == "__main__":
    main()
