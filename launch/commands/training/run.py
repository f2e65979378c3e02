"""`shardvit run`, and `shardvit train`, which launchers start on every rank."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.launch.flags import DataFile, RunsFolder, switch
from shardvit.launch.hosts.hostfile import HostOptions
from shardvit.launch.local.env import paths_file
from shardvit.launch.local.output import go_on
from shardvit.pipeline.recipe.vocabulary import StageName

_ONE_HOST = HostOptions()


def run(
    recipe: str,
    /,
    *overrides: str,
    stage: Annotated[StageName | None, Parameter(help="Only this stage; default: all, in order.")] = None,
    restart: Annotated[
        StageName | None,
        Parameter(
            help="Begin this stage and those after it again; their results are moved aside. Leave it out to resume."
        ),
    ] = None,
    data: DataFile = None,
    runs: RunsFolder = Path("runs"),
    max_restarts: Annotated[
        int, Parameter(help="How often failed stages are restarted automatically, over all stages.")
    ] = 0,
    hosts: HostOptions = _ONE_HOST,
    dry_run: Annotated[
        bool, Parameter(help="Check everything, print what would be run, start nothing. Shards may still be missing.")
    ] = False,
    all_keys: Annotated[bool, switch("With --dry-run: print every key, not only changed ones.")] = False,
) -> int:
    """Run a recipe's stages here or on several machines; skip finished ones, resume others.

    RECIPE is a YAML file or a name from `shardvit recipes`; OVERRIDES are changes to it, key=value.

    Some examples:
        shardvit run digits
        shardvit run vit_l16_in21k train=shards/in21k/train eval=shards/in21k/val finetune=cifar10 --data paths.yaml
        shardvit run my.yaml pretrain.optimizer.lr=3e-4 processes=8
        shardvit run my.yaml --stage finetune --restart finetune
        shardvit run my.yaml --hostfile hosts --exclude host3 --max-restarts 20
    """
    from shardvit.pipeline.recipe.io import difference_to_parent, load_recipe

    if all_keys and not dry_run:
        raise UserError("--all-keys says what --dry-run prints: give that too")
    # Report mistakes before importing anything slow.
    loaded = load_recipe(recipe, overrides=overrides, paths=paths_file(data))

    from shardvit.launch.run.pipeline_run import PipelineRun

    if not dry_run:
        go_on()
    opened = PipelineRun.open(
        loaded,
        runs_root=runs,
        restart=restart,
        fleet=hosts.fleet(),
        shards="if there" if dry_run else "needed",
        difference=difference_to_parent(recipe, overrides=overrides),
    )
    code = opened.execute(
        only=stage,
        mode="dry-run" if dry_run else "train",
        max_restarts=max_restarts,
        keys="all" if all_keys else "changed",
    )
    if not code and not dry_run:
        print(f"look at it: shardvit report {shlex.quote(str(opened.folder.path))}", flush=True)
    return code


def train(
    *arguments: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True, help="RECIPE [key=value ...] --stage STAGE [--data FILE] [--runs FOLDER]."
        ),
    ],
) -> int:
    """Run one stage of a recipe on this rank, as launchers do (`shardvit run` does it for you).

    Some examples:
        python -P -m shardvit.launch.local.torchrun --nproc-per-node 8 -m shardvit.launch.train my.yaml --stage pretrain

        shardvit train my.yaml --stage swap_head
    """
    from shardvit.launch.train import main as train_main

    return train_main(arguments)
