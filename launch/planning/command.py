"""`shardvit plan`: whether a recipe fits, how long it takes and what it costs, before anything is started.

Starts nothing, writes nothing, needs neither a GPU nor torch; a second for a local recipe. The command alone: what goes
in is `planning`'s, the numbers are `pipeline.budget`'s, the page is `planning.page`'s.
"""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter


def plan(
    recipe: str,
    /,
    *overrides: str,
    gpus: Annotated[
        int | None, Parameter(help="GPUs over all nodes; default: the recipe's processes, or this machine's.")
    ] = None,
    gpu: Annotated[str | None, Parameter(help="Their kind, such as h200, a100 or l4; default: this machine's.")] = None,
    gpus_per_node: Annotated[int, Parameter(help="GPUs in one machine.")] = 8,
    node_gbps: Annotated[
        float | None, Parameter(help="Network of one node in Gbit/s; default: usual for the GPU (h200: 3200).")
    ] = None,
    mfu: Annotated[
        float | None, Parameter(help="Share of the peak that training reaches, such as 0.45; default: an anchor.")
    ] = None,
    images_per_second: Annotated[
        float | None,
        Parameter(help="Of one GPU, as measured in the first training stage; the others follow by their FLOPs."),
    ] = None,
    images: Annotated[
        str | None,
        Parameter(help="Images in the training sets, in place of what the shards say: N, or STAGE=N,STAGE=N."),
    ] = None,
    classes: Annotated[str | None, Parameter(help="Their classes, likewise: N, or STAGE=N,STAGE=N.")] = None,
    as_json_text: Annotated[bool, Parameter(name="--json", negative="", help="Print the plan as JSON.")] = False,
) -> int:
    """Say what a recipe will need: memory, time, GPU-hours, traffic, disk; nothing is started.

    RECIPE and OVERRIDES are as for `shardvit run`. Warnings come first. The
    shards need not be there yet: give --images then, if durations are in epochs.
    Speed is a share of the GPU's peak (MFU) that is realistic for the model, or
    what you have measured. Times are of training alone.

    Some examples:
        shardvit plan my.yaml

        shardvit plan my.yaml --gpus 64 --gpu h200

        shardvit plan my.yaml --gpus 8 --gpu a100 --images 1281167 --classes 1000 engine.zero_stage=2

        shardvit plan my.yaml --gpus 64 --gpu h200 --images-per-second 1250 --json
    """
    from pipeline.recipe.io import load_recipe

    loaded = load_recipe(recipe, overrides=overrides)  # a mistake in it is said before anything slow is imported

    from launch.planning.gathering import make_plan
    from launch.planning.page import as_json, as_page

    made = make_plan(
        loaded,
        gpus=gpus,
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        node_gbps=node_gbps,
        mfu=mfu,
        images_per_second=images_per_second,
        images=images,
        classes=classes,
    )
    print(json.dumps(as_json(made), indent=1) if as_json_text else as_page(made))
    return 0
