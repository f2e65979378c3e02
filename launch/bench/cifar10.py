"""Train recipe `cifar10` and what it is compared with on CIFAR-10, over seeds, each at the recipe's CPU time.

Run `python -m shardvit.launch.bench.cifar10 SHARDS --out FOLDER`; the table is in records/cifar10.txt. SHARDS has train
and val: the test images, or for `--choices` a held-out tenth of the training images (`shardvit pack cifar10/train
SHARDS --holdout 0.1`). `--timm CHECKOUT --images cifar10/` adds timm's `train.py` on the same JPEGs. A finished run is
kept in FOLDER, with its result beside it; an unfinished one begins anew.

Each run is one process of one thread, two at a time; `--as-shipped` trains in the recipe's two, one run at a time.
Costs the recipe's time for each arm and seed, and for each choice `--share` of it. CPU time is that of all processes,
with start and evaluations; other programs stretch the clock, hardly this. An arm whose images cost more or less than
the recipe's has other durations, for equal CPU time.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean

from shardvit.launch.bench.cifar10_arms import score
from shardvit.launch.bench.measure import heading
from shardvit.pipeline.recipe.duration import parse_duration
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import StageName

RECIPE = "cifar10"
_SPLITS = {"train": "train", "eval": "val"}


@dataclass(frozen=True)
class Variation:
    """The recipe with changes, as one would type them."""

    meaning: str
    changes: tuple[str, ...] = ()
    recipe: str = RECIPE


def _rates(pretrain: float, finetune: float) -> tuple[str, ...]:
    return (f"pretrain.optimizer.lr={pretrain}", f"finetune.optimizer.lr={finetune}")


def _durations(pretrain: float, finetune: float) -> tuple[str, ...]:
    return (f"pretrain.duration={pretrain} epochs", f"finetune.duration={finetune} epochs")


_PLAIN = (
    *("model.resnet_layers=null", "model.patch_size=4", "model.width=192", "model.depth=6", "model.heads=3"),
    *("pretrain.image_size=24", "finetune.image_size=32"),
)
_STAGES = ("pretrain", "finetune")
_ADAMW = tuple(f"{stage}.optimizer.{key}" for stage in _STAGES for key in ("name=adamw", "weight_decay=0.05"))
_ADAMW += ("pretrain.optimizer.lr=0.001",)
_ROOT = ("model.resnet_layers=[]", "model.patch_size=4", "model.width=128", "model.depth=6", "model.heads=2")
_PAPERS = (
    *("pretrain.optimizer.name=adamw", "pretrain.optimizer.lr=0.003", "pretrain.optimizer.weight_decay=0.3"),
    *("pretrain.schedule.warmup=10%", "pretrain.schedule.decay=cosine", "pretrain.dropout=0.1"),
    *("pretrain.label_smoothing=0", "pretrain.global_batch_size=4096", "model.position=learned_1d", "model.pool=cls"),
    *("finetune.optimizer.name=sgd", "finetune.optimizer.lr=0.01", "finetune.optimizer.weight_decay=0"),
    *("finetune.schedule.warmup=10%", "finetune.schedule.decay=cosine", "finetune.global_batch_size=512"),
)
_NO_PRETRAINING = ("pretrain=null", "swap_head=null", "finetune.start=scratch")

ARMS: dict[str, Variation] = {
    "hybrid": Variation("the recipe"),
    "plain": Variation("no convolution but the patch embedding, patches of 4 px: 24 px, then 32 px", _PLAIN),
    "scratch": Variation("at 48 px from the first step", (*_NO_PRETRAINING, "finetune.duration=6 epochs")),
    "paper": Variation("the paper's Tables 3 (ImageNet) and 4, as warm-up a tenth instead of 10,000 steps", _PAPERS),
}
CHOICES: dict[str, Variation] = {
    "recipe": Variation("the recipe"),
    "adamw": Variation("AdamW, 0.001 and 0.0003, decay 0.05", (*_ADAMW, "finetune.optimizer.lr=0.0003")),
    "half_rates": Variation("0.0015 and 0.0004", _rates(0.0015, 0.0004)),
    "twice_rates": Variation("0.006 and 0.0015", _rates(0.006, 0.0015)),
    "root": Variation("the root alone, patches of 4 px, width 128, depth 6", (*_ROOT, *_durations(8, 2))),
    "one_stage": Variation("one ResNet stage of three units", ("model.resnet_layers=[3]",)),
    "32px": Variation("fine-tuning at 32 px, too", ("finetune.image_size=32", *_durations(8, 4.5))),
    "48px": Variation("pre-training at 48 px, too", ("pretrain.image_size=48", *_durations(3.5, 2))),
    "no_smoothing": Variation("labels as they are", ("pretrain.label_smoothing=0",)),
    "small_crops": Variation("crops from a quarter of the area", ("pretrain.augment.crop_area=[0.25,1]",)),
    "mixup": Variation("mixup 0.2", ("pretrain.augment.mixup_alpha=0.2",)),
    "learned": Variation("learned positions, class token", ("model.position=learned_1d", "model.pool=cls")),
}
TIMM = (
    *("--val-split=test", "--model=vit_tiny_patch16_224", "--gp=avg", "--num-classes=10", "--img-size=32"),
    *("--model-kwargs", "img_size=32", "patch_size=4", "depth=6", "class_token=False"),
    *("--input-size", "3", "32", "32", "--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5"),
    *("--device=cpu", "--amp", "--amp-dtype=bfloat16", "--workers=1", "--no-prefetcher", "-b=128"),
    *("--opt=adamw", "--lr=0.001", "--weight-decay=0.05", "--epochs=6", "--warmup-epochs=1", "--sched-on-updates"),
    *("--scale", "0.5", "1.0", "--color-jitter=0", "--smoothing=0.05", "--crop-pct=1"),
)
"""Options of timm's `train.py` for the plain model, in bf16, with the recipe's augmentation; tested on whole images.
Six epochs cost about the recipe's CPU time."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TIMM_FUSED_ATTN": "0"}  # on CPUs torch's kernel is slower for so few tokens


@dataclass(frozen=True)
class Result:
    """One run's top-1 on SHARDS/val, what it took, and the training images of all stages."""

    top1: float
    cpu_minutes: float
    wall_minutes: float
    images: int


def main() -> None:
    """Train what has no result yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results, gone on with")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", help=f"some of {','.join(ARMS)}")
    parser.add_argument("--choices", action="store_true", help="what each choice of the recipe buys, instead of ARMS")
    parser.add_argument("--share", type=float, default=1.0, help="of the recipe's images (%(default)s)")
    parser.add_argument("--as-shipped", action="store_true", help="in the recipe's processes, one run at a time")
    parser.add_argument("--timm", type=Path, help="a checkout of pytorch-image-models")
    parser.add_argument("--images", type=Path, help="the folder that SHARDS was packed from, for timm")
    options = parser.parse_args()
    table = CHOICES if options.choices else ARMS
    names = options.arms.split(",") if options.arms else list(table)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    processes = () if options.as_shipped else ("processes=1",)
    shared = {"shards": options.shards, "share": options.share, "processes": processes, "out": out}
    runs = list[Callable[[], None]]()
    for seed in range(options.seeds):
        runs += [partial(train, table[name], name=name, seed=seed, **shared) for name in names]
        if options.timm:
            runs.append(partial(train_timm, options.timm, images=options.images.resolve(), seed=seed, out=out))
    with ThreadPoolExecutor(1 if options.as_shipped else 2) as pool:
        list(pool.map(lambda run: run(), runs))  # an error or Ctrl-C cancels those that wait
    print("\n".join(report(read_results(out), meanings={name: arm.meaning for name, arm in table.items()})))


def train(
    arm: Variation, *, name: str, seed: int, shards: Path, share: float, processes: Sequence[str], out: Path
) -> None:
    """Run the arm's stages, or go on, and write its result."""
    name = f"{name}-{seed}"
    recipe = load_recipe(arm.recipe, overrides=arm.changes)
    trained: list[StageName] = [stage for stage in recipe.stages.names if stage != "swap_head"]
    durations = {stage: parse_duration(recipe.train_stage(stage).duration) for stage in trained}
    command = [sys.executable, "-m", "shardvit.launch.cli", "run", arm.recipe, "--runs", str(out)]
    command += [change for change in arm.changes if ".duration=" not in change]
    command += [f"name={name}", f"seed={seed}", *processes]
    command += [f"{stage}.duration={each.amount * share:g} {each.unit}" for stage, each in durations.items()]
    command += [f"{stage}.{role}={shards / split}" for stage in trained for role, split in _SPLITS.items()]
    measured = measure(command, name=name, out=out)
    if measured is not None:
        records = [json.loads((out / name / stage / "stage.json").read_text()) for stage in trained]
        images = sum(record["images_seen"] for record in records)
        keep(Result(records[-1]["results"]["val/top1"], *measured, images), name=name, out=out)


def train_timm(checkout: Path, *, images: Path, seed: int, out: Path) -> None:
    """Run timm's script on the JPEGs and write its result."""
    name = f"timm-{seed}"
    command = [sys.executable, str(checkout / "train.py"), *TIMM, f"--data-dir={images}", f"--seed={seed}"]
    measured = measure([*command, f"--output={out}", f"--experiment={name}"], name=name, out=out)
    if measured is not None:
        with (out / name / "summary.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        keep(Result(float(rows[-1]["eval_top1"]) / 100, *measured, len(rows) * 50_000), name=name, out=out)


def measure(command: Sequence[str], *, name: str, out: Path) -> tuple[float, float] | None:
    """Run a command that has no result yet and return its minutes of CPU time and of the clock; RuntimeError with its
    output if it fails."""
    if (out / f"{name}.json").exists():
        return None
    shutil.rmtree(out / name, ignore_errors=True)
    log, start = out / f"{name}.log", time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, env=os.environ | _ENVIRONMENT, stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)  # with its children's time
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{name}: exit {process.returncode}\n{log.read_text(encoding='utf-8')[-2000:]}")
    return (usage.ru_utime + usage.ru_stime) / 60, (time.monotonic() - start) / 60


def keep(result: Result, *, name: str, out: Path) -> None:
    """Write a result."""
    (out / f"{name}.json").write_text(json.dumps(asdict(result)), encoding="utf-8")
    print(f"{name}: top-1 {result.top1:.4f}, {result.cpu_minutes:.1f} minutes of CPU time", flush=True)


def read_results(out: Path) -> dict[str, list[Result]]:
    """Variation -> the results of its seeds."""
    found: dict[str, list[Result]] = {}
    for file in sorted(out.glob("*-*.json")):
        found.setdefault(file.stem.rpartition("-")[0], []).append(Result(**json.loads(file.read_text())))
    return found


def report(found: Mapping[str, Sequence[Result]], *, meanings: Mapping[str, str]) -> list[str]:
    """Format the table, the best first."""
    scores = {arm: score([each.top1 for each in results]) for arm, results in found.items()}
    return [
        heading("torch", "timm"),
        f"{'arm':<12} {'top-1':>7} {'error':>7} {'seeds':>6} {'images':>9} {'CPU min':>8}  what",
        *(
            f"{arm:<12} {scores[arm].mean:7.4f} {scores[arm].shown_error:>7} {scores[arm].seeds:6} "
            f"{found[arm][0].images:9,} {mean(each.cpu_minutes for each in found[arm]):8.1f}  {meanings.get(arm, '')}"
            for arm in sorted(scores, key=lambda arm: -scores[arm].mean)
        ),
    ]


if __name__ == "__main__":
    main()
