"""The `shardvit` command. Heavy libraries are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from data_shards.errors import UserError

EXIT_USER_ERROR = 2
EXIT_STOPPED = 75

app = App(
    name="shardvit",
    help="Pre-train Vision Transformers from WebDataset shards: pretrain, swap head, finetune.",
    help_epilogue="Exit codes: 0 done, 2 a mistake in the command or recipe, 75 stopped by a signal after saving.",
    version="0.1.0.dev0",
    help_format="plaintext",
)


def main() -> None:
    """Entry point of the console script."""
    try:
        sys.exit(app(exit_on_error=False, print_error=False, result_action="return_value") or 0)
    except KeyboardInterrupt:  # between two stages, or while packing
        print("\nshardvit: interrupted: the same command goes on from here", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except (UserError, CycloptsError) as error:
        print(f"shardvit: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


@app.command
def pack(
    source: str,
    out: Path,
    /,
    *,
    classes: Annotated[
        str | None, Parameter(help="Only these classes, comma separated; they get labels 0, 1, ...")
    ] = None,
    holdout: Annotated[float | None, Parameter(help="Share of each class kept apart as the split 'val'.")] = None,
    samples_per_shard: Annotated[int, Parameter(help="Images in one tar.")] = 1000,
    seed: Annotated[int, Parameter(help="Of the shuffle and of the held-out choice.")] = 0,
) -> int:
    """Pack images into WebDataset shards with a manifest.

    SOURCE is a folder of class folders (or train/ and val/ of them), a folder with the four IDX files of MNIST or
    Fashion-MNIST, "fashion-mnist" for the ones that Debian installs, or "digits" for scikit-learn's digits.

    Some examples:
        shardvit pack photos/ shards/photos --holdout 0.1

        shardvit pack digits shards/digits --classes 0,1,2,3,4,5,6 --holdout 0.2
    """
    from data_shards.pack import pack as pack_images

    pack_images(
        source,
        out,
        classes=[name.strip() for name in classes.split(",")] if classes else None,
        holdout=holdout,
        samples_per_shard=samples_per_shard,
        seed=seed,
        report=print,
    )
    return 0


@app.command
def run(
    recipe: str,
    /,
    *overrides: str,
    stage: Annotated[
        Literal["pretrain", "swap_head", "finetune"] | None, Parameter(help="Only this stage; default: all, in order.")
    ] = None,
    restart: Annotated[
        Literal["pretrain", "swap_head", "finetune"] | None,
        Parameter(help="Begin this stage and those after it again; what is there is moved aside."),
    ] = None,
    runs: Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db.")] = Path("runs"),
    dry_run: Annotated[bool, Parameter(help="Check everything, print the resolved recipe, start nothing.")] = False,
) -> int:
    """Run a recipe's stages on this machine: finished ones are skipped, an interrupted one goes on.

    RECIPE is a YAML file or the name of a recipe that ships with shardvit; OVERRIDES are changes to it, key=value.

    Some examples:
        shardvit run digits

        shardvit run my.yaml stages.pretrain.optimizer.lr=3e-4 processes=8

        shardvit run my.yaml --stage finetune --restart finetune
    """
    from launch.pipeline_run import PipelineRun

    return PipelineRun.open(recipe, overrides=overrides, runs_root=runs, restart=restart).execute(
        only=stage, mode="dry-run" if dry_run else "train"
    )


@app.command
def train(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, help="RECIPE --stage STAGE and the rest.")],
) -> int:
    """Run one stage of a recipe on this rank: what every launcher starts (`shardvit run` does it for you).

    Some examples:
        torchrun --nproc-per-node 8 -m launch.train my.yaml --stage pretrain --runs runs key=value

        shardvit train my.yaml --stage swap_head
    """
    from launch.train import main as train_main

    return train_main(arguments)


@app.command
def demo(
    *,
    data: Annotated[Literal["digits", "fashion-mnist"], Parameter(help="Which images.")] = "digits",
    runs: Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db.")] = Path("runs"),
    shards: Annotated[Path, Parameter(help="Where the shards are packed to.")] = Path("shards"),
) -> int:
    """Run the whole pipeline on small real images: pack, pretrain, swap head, finetune, and compare with scratch.

    Some examples:
        shardvit demo

        shardvit demo --data fashion-mnist
    """
    from launch.demo import run_demo

    return run_demo(data, runs_root=runs, shards_root=shards)


if __name__ == "__main__":
    main()
