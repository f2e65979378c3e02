"""`shardvit.run` and `shardvit.plan`: the commands as functions. Processes are started as the commands do, so a script
needs no `if __name__` guard, and its own process imports no torch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.data_shards.errors import UserError
from shardvit.launch.api.loaded_run import LoadedRun
from shardvit.launch.api.options import PathLike, RecipeLike, options_of, recipe_of, texts_of
from shardvit.launch.hosts.hostfile import HostOptions
from shardvit.launch.local.env import paths_file
from shardvit.pipeline.ranks.stopping import Stopped
from shardvit.pipeline.recipe.io import difference_to_parent, load_recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED, EXIT_USER_ERROR, StageName
from shardvit.pipeline.runs.read import read_run
from shardvit.pipeline.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from shardvit.launch.plan.plan_page import RecipeForecast


class RunFailed(RuntimeError):
    """A run ended unfinished, and not by a mistake of the user: the ranks' output has the cause, and a traceback."""


def run(
    recipe: RecipeLike,
    *,
    stage: StageName | None = None,
    restart: StageName | None = None,
    data: PathLike | None = None,
    runs: PathLike = "runs",
    max_restarts: int = 0,
    hostfile: PathLike | None = None,
    **overrides: Any,
) -> LoadedRun:
    """Run a recipe's stages, as `shardvit run` does: skip finished ones, resume others, refuse a changed recipe.

    The ranks are processes of their own, watched from here. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 make them finish their
    step and save; a second Ctrl-C ends them at once (KeyboardInterrupt). Outside of the main thread signals are left
    alone.

    Args:
        recipe: a YAML file, a name from `shardvit recipes`, or a mapping of a recipe's keys.
        stage: only this one; None: all, in order.
        restart: begin this stage and those after it again; their results are moved aside.
        data: YAML file with the shards of each role; None: `$SHARDVIT_DATA`, if set.
        runs: folder of all runs.
        max_restarts: how often failed stages are started again, over all stages.
        hostfile: run on the machines of this file, over ssh.
        overrides: changes to the recipe: `seed=1`, `model={...}`, `**{"pretrain.optimizer.lr": 3e-4}`.

    Returns:
        The finished run.

    Raises:
        UserError: a mistake in recipe, data or options, a changed recipe, a full disk (the command's exit code 2).
        Stopped: a signal came and the ranks have saved; the same call resumes (75).
        RunFailed: anything else (1).

    Example:
        run = shardvit.run("digits", runs="runs", processes=2, **{"pretrain.duration": "400 steps"})
    """
    source, changes = recipe_of(recipe), texts_of(overrides)
    loaded = load_recipe(source, overrides=changes, paths=paths_file(Path(data) if data is not None else None))

    from shardvit.launch.run.pipeline_run import PipelineRun

    opened = PipelineRun.open(
        loaded,
        runs_root=Path(runs),
        restart=restart,
        fleet=HostOptions(Path(hostfile) if hostfile is not None else None).fleet(),
        difference=difference_to_parent(source, overrides=changes),
    )
    since = time.time()
    code = opened.execute(only=stage, max_restarts=max_restarts)
    path = opened.folder.path
    if code == EXIT_STOPPED:
        raise Stopped(f"{path} was stopped and has saved: the same call resumes it")
    if code:
        words = _last_words(opened.folder, since=since) or "the lines above have the cause"
        raise UserError(words) if code == EXIT_USER_ERROR else RunFailed(f"{path} is not finished: {words}")
    return LoadedRun(opened.folder)


def plan(
    recipe: RecipeLike,
    *,
    data: PathLike | None = None,
    **options: Any,
) -> RecipeForecast:
    """Estimate a recipe's memory, time, traffic and disk, as `shardvit plan` does; nothing is started.

    Args:
        recipe: as for `run`, as is `data`.
        data: YAML file with the shards of each role.
        options: those of the command, such as `gpus=64`, `gpu="h200"` or `images=1281167`; all others are overrides,
            as for `run`.

    Returns:
        A frozen record: `warnings`, `hours`, and for each of `stages` its `memory`, `time`, `disk`, `cost`, `plan`.

    Raises:
        UserError: a mistake in recipe or options.

    Example:
        print(shardvit.plan("vit_l16_in21k", gpus=64, gpu="h200").hours)
    """
    from shardvit.launch.plan.gathering import make_plan
    from shardvit.launch.plan.plan_options import PlanOptions

    own = {name: value for name, value in options.items() if name in PlanOptions.__dataclass_fields__}
    own |= {name: str(own[name]) for name in ("images", "classes") if name in own}  # a number, or STAGE=N,STAGE=N
    overrides = texts_of({name: value for name, value in options.items() if name not in own})
    paths = paths_file(Path(data) if data is not None else None)
    return make_plan(load_recipe(recipe_of(recipe), overrides=overrides, paths=paths), options_of(PlanOptions, own))


def _last_words(folder: RunFolder, *, since: float) -> str:
    """Return why the ranks failed, as the run's events say; "" if they do not."""
    stages = read_run(folder).stages if folder.is_begun() else ()
    failed = [each for stage in stages for each in stage.events if each.kind == "failed" and each.time >= since]
    return max(failed, key=lambda each: each.time).text if failed else ""
