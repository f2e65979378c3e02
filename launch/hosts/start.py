"""From a recipe and its hosts to a function that runs a stage on them: `preflight` is done by then.

`swap_head` is arithmetic on saved weights: it stays on this host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from data_shards.manifest import MANIFEST_FILE
from data_shards.shard_set import ShardSet
from data_shards.store.location import Commands, is_local, local_path
from launch.env import without_place
from launch.hosts.hostfile import Fleet
from launch.hosts.preflight import preflight
from launch.hosts.stage import run_stage_on_hosts
from launch.hosts.variables import travelling
from launch.local import Launch, run_stage_locally
from pipeline.recipe.schema import Recipe, StageName, TrainStage
from pipeline.stage_data import open_data


def prepare(
    fleet: Fleet,
    *,
    recipe: Recipe,
    runs_root: Path,
    say: Callable[[str], None],
    stages: Sequence[StageName] | None = None,
    commands: Commands = "run",
) -> Callable[[Launch], int]:
    """Ask every host; the function that then runs a stage, as `run_stage_locally` does on one machine.

    Args:
        fleet: the hosts.
        recipe: what will be run.
        runs_root: folder of the runs.
        say: takes what is to be shown.
        stages: of these the shards are looked for on every host; default: of all.
        commands: whether a `pipe:` is run to find out what lies there.

    Raises:
        UserError: hosts that are not ready.
        OSError: nothing can be written to `runs_root`.
    """
    variables = travelling(without_place(), folders=(Path.home(), Path()))
    say(variables.describe())
    files: list[Path] = []
    for stage in recipe.stages.names if stages is None else stages:
        if isinstance(getattr(recipe.stages, stage), TrainStage):
            data = open_data(recipe, stage=stage, report=lambda text: None, commands=commands)
            files += shared_files((data.train, data.eval))
    ready = preflight(
        fleet,
        folder=runs_root,
        files=list(dict.fromkeys(files)),
        python_path=variables.all.get("PYTHONPATH", ""),
        say=say,
    )

    def start(launch: Launch) -> int:
        if launch.stage == "swap_head":
            return run_stage_locally(launch)
        return run_stage_on_hosts(launch, fleet, ready, variables=variables.all)

    return start


def shared_files(sets: Iterable[ShardSet]) -> list[Path]:
    """Of each local folder of shards the manifest, or a tar where there is none."""
    found: dict[Path, Path] = {}
    for shards in sets:
        for shard in shards.shards:
            if not is_local(shard.url):
                continue
            tar = local_path(shard.url)
            if tar.parent not in found:
                manifest = tar.parent / MANIFEST_FILE
                found[tar.parent] = manifest if manifest.is_file() else tar
    return list(found.values())
