"""`shardvit demo`: the whole pipeline on small real images, ending in a table and the next commands to type.

Packs two shard sets (one to pre-train on, three other classes to transfer to), runs the recipe, repeats its fine-tuning
from scratch, and compares. CIFAR-10, which must be at hand, is one set for both stages, without the comparison. Resumes
when run again after an interruption.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import table
from shardvit.launch.flags import RunsFolder
from shardvit.launch.local.env import num_gpus
from shardvit.launch.local.output import go_on

if TYPE_CHECKING:
    from shardvit.pipeline.recipe.vocabulary import StageName
    from shardvit.pipeline.runs.run_folder import RunFolder

DemoData = Literal["digits", "fashion-mnist", "cifar10"]

CIFAR10_NAMES = (
    *("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz", "cifar-10-batches-py", "cifar-10-batches-bin"),
    *("cifar10", "cifar10-imagefolder.tar.gz"),
)
"""As published, then folders train/CLASS/*.jpg and test/CLASS/*.jpg; the first that is there is taken."""


@dataclass(frozen=True)
class DemoChoice:
    """A demo's recipe, and the classes and held-out share of each shard set; without classes it has one set, and no
    comparison with training from scratch."""

    recipe: str
    pretrain_classes: tuple[str, ...] = ()
    transfer_classes: tuple[str, ...] = ()
    pretrain_holdout: float | None = None  # None: the source has its own held-out split
    transfer_holdout: float | None = None
    other_lr: float = 0.01  # to fine-tune once more with


CHOICES: dict[DemoData, DemoChoice] = {
    "digits": DemoChoice(
        "digits",
        pretrain_classes=("0", "1", "4", "5", "6", "7", "9"),
        transfer_classes=("2", "3", "8"),  # look alike: slow to learn from scratch
        pretrain_holdout=0.2,
        transfer_holdout=0.3,
    ),
    "fashion-mnist": DemoChoice(
        "fashion_mnist",
        pretrain_classes=("T-shirt/top", "Trouser", "Dress", "Sandal", "Shirt", "Sneaker", "Bag"),
        transfer_classes=("Pullover", "Coat", "Ankle boot"),
    ),
    "cifar10": DemoChoice("cifar10", other_lr=0.001),
}


def demo(
    *,
    data: Annotated[DemoData, Parameter(help="Which images.")] = "digits",
    runs: RunsFolder = Path("runs"),
    shards: Annotated[Path, Parameter(help="Where the shards are packed to.")] = Path("shards"),
    source: Annotated[Path | None, Parameter(help="CIFAR-10's archive or folder, if not in this folder.")] = None,
) -> int:
    """Run the whole pipeline on small real images, and compare with training from scratch.

    Some examples:
        shardvit demo
        shardvit demo --data fashion-mnist
        shardvit demo --data cifar10 --source cifar-10-python.tar.gz
    """
    go_on()
    choice, images = CHOICES[data], _source(data, source)
    print(f"== packing {data} ==", flush=True)
    from shardvit.data_shards.packing.pack import pack  # late: the first line must not wait
    from shardvit.launch.local.nursery import open_nursery
    from shardvit.launch.run.pipeline_run import PipelineRun
    from shardvit.pipeline.recipe.io import difference_to_parent, load_recipe

    packed: list[tuple[str, tuple[str, ...] | None, float | None]] = [
        ("-pretrain", choice.pretrain_classes, choice.pretrain_holdout),
        ("-transfer", choice.transfer_classes, choice.transfer_holdout),
    ]
    recipes = (choice.recipe, f"{choice.recipe}_scratch")
    if not choice.transfer_classes:
        packed = [("", None, None)]
        recipes = recipes[:1]
    folders: list[RunFolder] = []
    with ExitStack() as held:
        nursery = held.enter_context(open_nursery())  # imports the libraries meanwhile
        for use, classes, holdout in packed:
            pack(images, shards / f"{data}{use}", classes=classes, holdout=holdout)
        for recipe in recipes:
            print(f"\n== {recipe} ==", flush=True)
            changes = [*_shard_paths(recipe, data, shards), *_few_shot(recipe, data, shards), *_machine(data)]
            run = PipelineRun.open(
                load_recipe(recipe, overrides=changes),
                runs_root=runs,
                difference=difference_to_parent(recipe, overrides=changes),
                nursery=nursery or held.enter_context(open_nursery()),
            )
            if code := run.execute():
                return code
            folders.append(run.folder)
            nursery = None  # it ended with its ranks
    transferred, *others = folders
    print(
        f"\n{comparison(transferred, scratch=next(iter(others), None))}\n\n{next_commands(data, runs_root=runs)}\n",
        flush=True,
    )
    from shardvit.launch.pages.sections import write_beside

    print(f"report  {write_beside(transferred, others=others)}")
    return 0


def _source(data: DemoData, given: Path | None) -> str:
    """What to pack; UserError if CIFAR-10 is not at hand."""
    if data != "cifar10":
        if given:
            raise UserError(f"--source: the images of {data} are on this machine; it is for --data cifar10")
        return data
    found = given or next((Path(name) for name in CIFAR10_NAMES if Path(name).exists()), None)
    if found is None:
        raise UserError(f"cifar10: nothing here is named {', '.join(CIFAR10_NAMES)}; give --source PATH")
    return str(found)


def _shard_paths(recipe: str, data: DemoData, shards_root: Path) -> list[str]:
    if shards_root == Path("shards"):
        return []
    one = not CHOICES[data].transfer_classes
    uses = {"pretrain": "" if one else "-pretrain", "finetune": "" if one else "-transfer"}
    if recipe.endswith("_scratch"):
        del uses["pretrain"]
    return [
        f"stages.{stage}.{key}={shards_root / f'{data}{use}' / split}"
        for stage, use in uses.items()
        for key, split in (("train", "train"), ("eval", "val"))
    ]


def _few_shot(recipe: str, data: DemoData, shards_root: Path) -> list[str]:
    if recipe.endswith("_scratch") or not CHOICES[data].transfer_classes:
        return []
    transfer = shards_root / f"{data}-transfer"
    config = {"name": "transfer", "train": f"{transfer}/train", "eval": f"{transfer}/val", "shots": [5, 10]}
    return [f"stages.pretrain.few_shot={json.dumps([config])}"]


def _machine(data: DemoData) -> list[str]:
    """The recipes have two processes; on GPUs, each needs its own. On CPUs without bf16, float32 is faster."""
    if gpus := num_gpus():
        return [f"processes={min(2, gpus)}"]
    facts = Path("/proc/cpuinfo")
    has_bf16 = facts.exists() and re.search(r"\b(amx|avx512)_bf16\b", facts.read_text(encoding="utf-8"))
    return ["engine.precision=fp32"] if data == "cifar10" and not has_bf16 else []


def comparison(transferred: RunFolder, *, scratch: RunFolder | None) -> str:
    """Tabulate each stage's images, seconds and top-1, and the top-1 of fine-tuning from scratch, if it was done."""
    from shardvit.pipeline.recipe.io import parse_recipe

    def top1(folder: RunFolder, name: StageName) -> str:
        by = "" if name == "swap_head" else recipe.train_stage(name).judged_by("top1")
        results = folder.record(name).results
        return f"{results[by]:.4f}" if by in results else ""

    recipe = parse_recipe(transferred.path / "recipe.yaml")
    stages = recipe.stages
    rows = [
        ("stage", "images seen", "seconds", "resolution", "top-1 held out", "top-1 from scratch" if scratch else "")
    ]
    for name in stages.names:
        record, size = transferred.record(name), getattr(getattr(stages, name), "image_size", None)
        own, other = top1(transferred, name), top1(scratch, name) if scratch and name == "finetune" else ""
        seen, seconds = f"{record.images_seen:,}", f"{record.seconds:.1f}"
        rows.append((name, seen, seconds, f"{size} px" if size else "", own, other))
    return table(rows, align="lr", heading="ruled")


def next_commands(data: DemoData, *, runs_root: Path) -> str:
    """Suggest the next commands."""
    choice = CHOICES[data]
    shardvit, mlflow = _command("shardvit", module="shardvit.launch.cli"), _command("mlflow", module="mlflow")
    return (
        "Next:\n"
        f"  look at it in MLflow    {mlflow} ui --backend-store-uri sqlite:///{runs_root}/mlflow.db\n"
        f"                          and open http://127.0.0.1:5000/#/experiments/1?workflowType=machine_learning\n"
        f"  resume                  interrupt a run (Ctrl-C or kill -9) and type the same command again\n"
        f"  fine-tune once more     {shardvit} run {choice.recipe} --restart finetune "
        f"{' '.join([f'stages.finetune.optimizer.lr={choice.other_lr}', *_machine(data)])}\n"
        f"  use your own images     {shardvit} pack FOLDER_OF_CLASS_FOLDERS shards/mine --holdout 0.1\n"
        f"                          {shardvit} recipes photos > my.yaml, set its train and eval, {shardvit} run my.yaml"
    )


def _command(name: str, *, module: str) -> str:
    """A command of this environment: its script, else `python -m`."""
    script = Path(sys.executable).parent / name
    if not script.exists():
        return f"{sys.executable} -m {module}"
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else str(script)
