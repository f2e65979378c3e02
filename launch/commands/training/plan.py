"""`shardvit plan`: does a recipe fit, how long does it take, what does it cost. Takes a second, no GPU, no torch."""

import json

from shardvit.launch.flags import DataFile, JsonFlag
from shardvit.launch.local.env import paths_file
from shardvit.launch.plan.plan_options import PlanOptions

_NO_OPTIONS = PlanOptions()


def plan(
    recipe: str,
    /,
    *overrides: str,
    options: PlanOptions = _NO_OPTIONS,
    data: DataFile = None,
    as_json_text: JsonFlag = False,
) -> int:
    """Estimate a recipe's memory, time, GPU-hours, traffic and disk; nothing is started.

    RECIPE and OVERRIDES are as for `shardvit run`. Warnings come first. The
    shards need not exist yet: without them, the published size of a known data
    set is used; for others give --images if durations are in epochs.
    Speed is a share of the GPU's peak (MFU) that is realistic for the model, or
    your own measurement. Times are of training alone.

    Some examples:
        shardvit plan my.yaml
        shardvit plan vit_l16_in21k --gpus 64 --gpu h200
        shardvit plan my.yaml --gpus 8 --gpu a100 --images 1281167 --classes 1000 engine.zero_stage=2
        shardvit plan my.yaml --gpus 64 --gpu h200 --images-per-second 1250 --json
    """
    from shardvit.pipeline.recipe.io import load_recipe

    # Report mistakes before importing anything slow.
    loaded = load_recipe(recipe, overrides=overrides, paths=paths_file(data))

    from shardvit.launch.plan.gathering import make_plan
    from shardvit.launch.plan.plan_page import as_json, as_page

    made = make_plan(loaded, options)
    print(json.dumps(as_json(made), indent=1) if as_json_text else as_page(made))
    return 0
