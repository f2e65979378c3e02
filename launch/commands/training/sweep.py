"""`shardvit sweep`: choose values of a recipe's keys on a held-out part of the training set, as the ViT paper does."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.launch.flags import DataFile, RunsFolder, switch
from shardvit.launch.local.env import paths_file
from shardvit.launch.local.output import go_on
from shardvit.pipeline.recipe.vocabulary import StageName


def sweep(
    recipe: str,
    /,
    *overrides: str,
    stage: Annotated[
        StageName | None, Parameter(help="Stage to choose by; later ones run at the end only. Default: last.")
    ] = None,
    hold_out: Annotated[
        str | None,
        Parameter(
            help="Share to choose by, such as 2%; default: the paper's (ImageNet 1%, CIFAR 2%, Pets and Flowers 10%)."
        ),
    ] = None,
    data: DataFile = None,
    runs: RunsFolder = Path("runs"),
    widen: Annotated[bool, switch("Extend the grid while the best point is at its edge, up to 3 times.")] = False,
    max_restarts: Annotated[int, Parameter(help="How often failed stages of a run are restarted automatically.")] = 0,
    dry_run: Annotated[bool, switch("Check, print the points and their cost, start nothing.")] = False,
) -> int:
    """Train a grid on part of the images, choose on the rest, train on all of them.

    RECIPE and OVERRIDES are as for `shardvit run`, but a key may have several
    values, key=a,b,c: the grid is their product. Commas in quotes or brackets do
    not separate: key=[0.05,1] is one value, a list. Default: the paper's rates,
    for fine-tuning with sgd on one of its data sets.

    A fixed part of the last stage's training set is held out. Each point trains
    on the rest. Earlier stages are trained once and shared; if one trains on the
    same images, choose its keys with --stage. The best held-out top-1 wins (then
    the lowest loss, then the first), and the recipe runs with its values on all
    images. The table names points that tie within the standard error, and a best
    value at the edge of the grid.

    RUNS/NAME-sweep has a run folder for each point, `final`, and sweep.json with
    the table. The same command resumes; a changed grid keeps finished points.

    Some examples:
        shardvit sweep cifar10 pretrain.optimizer.lr=1e-3,2e-3 --stage pretrain --hold-out 2%
        shardvit sweep vit_b16_in21k finetune=cifar10 --data paths.yaml
        shardvit sweep my.yaml finetune.optimizer.lr=0.003,0.01 --hold-out 1% --dry-run
    """
    from shardvit.launch.sweep.points import plan_sweep, read_share

    # Report mistakes before importing anything slow.
    share = read_share(hold_out)
    plan = partial(plan_sweep, recipe, overrides, runs_root=runs, paths=paths_file(data), stage=stage, hold_out=share)
    planned = plan()
    if max_restarts < 0:
        raise UserError(f"--max-restarts: it is {max_restarts}; give 0 or more")
    if dry_run:
        from shardvit.launch.sweep.outline import outline

        print(outline(planned))
        if widen:
            print("--widen: more points where the best one lies at the edge of this grid.")
        return 0
    from shardvit.launch.sweep.local import run_sweep

    go_on()
    return run_sweep(planned, max_restarts=max_restarts, widen=plan if widen else None)
