"""Compare ways to train one small plain ViT on CIFAR-10 at equal images: from scratch, with AugReg's and with DeiT's
augmentation, after a masked autoencoder, distilled from a small teacher.

Run `python -m shardvit.launch.bench.cifar10_arms SHARDS`, where SHARDS has train and val (10,000 test images); output
in records/cifar10_arms.txt. Each arm sees `--images` training images for each seed, pre-training included; the
teacher's own training comes on top. Each run is a process of one thread of `shardvit run`, two at a time. The recipe
was not tuned for any arm: at so few images, weak augmentation has the advantage.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardvit.launch.bench.measure import setting

Tree = dict[str, Any]

_BATCH = 128
_TEACHER = "teacher"
_STRONG = {
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "random_erasing": {"probability": 0.25},
    "mixup_alpha": 0.8,
    "cutmix_alpha": 1.0,
}


@dataclass(frozen=True)
class Arm:
    """A way to train, as changes to the shared recipe."""

    meaning: str
    finetune: Tree
    masked_share: float = 0.0  # of the images, for a masked autoencoder


ARMS: dict[str, Arm] = {
    "scratch": Arm("crop and flip", {}),
    "augreg": Arm(
        "RandAugment(2, 10), mixup 0.2, as AugReg's light1",
        {"augment": {"rand_augment": {"num_ops": 2, "magnitude": 10}, "mixup_alpha": 0.2}},
    ),
    "deit": Arm(
        "rand-m9-mstd0.5-inc1, mixup 0.8, CutMix 1, erasing, smoothing, stochastic depth, as DeiT",
        {"augment": _STRONG, "label_smoothing": 0.1, "stochastic_depth": 0.1},
    ),
    "mae": Arm("half the images without labels (MAE), then as scratch", {}, masked_share=0.5),
    "distilled": Arm(
        "as scratch, with soft targets of a small teacher", {"distill": {"teacher": _TEACHER, "kind": "soft"}}
    ),
}


@dataclass(frozen=True)
class Score:
    """Top-1 on the test images over seeds."""

    mean: float
    standard_error: float
    seeds: int

    @property
    def shown_error(self) -> str:
        """One seed has none."""
        return f"{self.standard_error:.4f}" if self.seeds > 1 else "-"


def main() -> None:
    """Train all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--images", type=int, default=40_000, help="of each run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS), help="some of them (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("cifar10_arms"), help="folder of runs, gone on with")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    arms, seeds = options.arms.split(","), range(options.seeds)
    shared = {"shards": options.shards.resolve(), "images": options.images, "out": options.out.resolve()}
    teacher = top1(recipe(Arm("", {}), name=_TEACHER, seed=100, small_teacher=True, **shared), out=shared["out"])
    trees = {
        (arm, seed): recipe(ARMS[arm], name=f"{arm}-{seed}", seed=seed, **shared) for arm in arms for seed in seeds
    }
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(trees, pool.map(lambda tree: top1(tree, out=shared["out"]), trees.values()), strict=True))
    scores = {arm: score([found[arm, seed] for seed in seeds]) for arm in arms}
    print("\n".join(report(scores, images=options.images, teacher=teacher)))


def recipe(
    arm: Arm, *, name: str, seed: int, shards: Path, images: int, out: Path, small_teacher: bool = False
) -> Tree:
    """Make the arm's recipe."""
    masked_images = int(images * arm.masked_share)
    shared: Tree = {
        "train": str(shards / "train"),
        "eval": str(shards / "val"),
        "image_size": 24,
        "global_batch_size": _BATCH,
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.05},
        "schedule": {"warmup": "10%", "decay": "cosine"},
        "augment": {"crop_area": [0.5, 1.0], "flip": 0.5},
        "eval_every": "0 steps",
        "save_every": "50%",
    }
    finetune: Tree = shared | {"start": "swap_head" if masked_images else "scratch"}
    finetune |= {"duration": f"{images - masked_images} images"} | arm.finetune
    finetune["augment"] = shared["augment"] | arm.finetune.get("augment", {})
    if "distill" in finetune:
        finetune["distill"] = finetune["distill"] | {"teacher": str(out / _TEACHER / "finetune" / "model")}
    stages: Tree = {"finetune": finetune}
    if masked_images:
        pretrain = shared | {"duration": f"{masked_images} images", "decoder": {"width": 64, "depth": 2, "heads": 2}}
        stages = {"masked_autoencoder": pretrain, "swap_head": {}, **stages}
    model: Tree = {"width": 96, "depth": 4, "heads": 3, "patch_size": 4, "pool": "gap", "position": "sincos_2d"}
    if small_teacher:  # the convolutional root and Muon of recipe cifar10
        model |= {"resnet_layers": []}
        finetune["optimizer"] = {"name": "muon", "lr": 0.002, "weight_decay": 0.1}
    return {
        "name": name,
        "seed": seed,
        "processes": 1,
        "pictures": "off",
        "tracking": {"to": []},
        "model": model,
        "engine": {"zero_stage": 0, "precision": "fp32"},
        "stages": stages,
    }


def top1(tree: Tree, *, out: Path) -> float:
    """Train, or go on, and read the last held-out top-1; RuntimeError with the output of a run that fails."""
    file, runs = out / f"{tree['name']}.yaml", ["--runs", str(out)]
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    done = subprocess.run(
        [sys.executable, "-m", "shardvit.launch.cli", "run", str(file), *runs],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{tree['name']}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    record = json.loads((out / tree["name"] / "finetune" / "stage.json").read_text())
    return float(record["results"]["val/top1"])


def score(found: Sequence[float]) -> Score:
    """Mean and its standard error."""
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return Score(statistics.mean(found), error, len(found))


def report(scores: Mapping[str, Score], *, images: int, teacher: float) -> list[str]:
    """Format the table, the best first."""
    order = sorted(scores, key=lambda arm: -scores[arm].mean)
    return [
        setting("torch", "timm"),
        f"CIFAR-10, width 96, depth 4, patches of 4 pixels at 24 px, {images:,} training images a run; top-1 on the",
        "10,000 test images, mean and standard error",
        f"teacher, with a convolutional root and Muon, at as many images: {teacher:.4f}",
        "",
        f"{'arm':<10} {'top-1':>7} {'error':>7} {'seeds':>6}  what",
        *(
            f"{arm:<10} {scores[arm].mean:7.4f} {scores[arm].shown_error:>7} {scores[arm].seeds:6}  {ARMS[arm].meaning}"
            for arm in order
        ),
    ]


if __name__ == "__main__":
    main()
