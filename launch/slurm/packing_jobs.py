"""`shardvit submit --pack`: a packing as SLURM jobs, without Ray.

    plan     lists the source and fixes the order
    shards   an array of N tasks; task i makes shards i, i + N, ...
    finish   lists, statistics and manifests

Each waits for the one before. A task that its node or the time limit ends is requeued and makes what is missing. Jobs
and logs are in OUT.jobs/slurm beside OUT, or for a URL in RUNS/NAME.jobs. The same command again submits what is not
done: nothing of a finished OUT, no plan if it is made, only tasks with unfinished shards.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.plan_file import load_job
from shardvit.data_shards.packing.shard_writer import find_records
from shardvit.data_shards.shards.location import is_local, local_path
from shardvit.data_shards.shards.manifest import MANIFEST_FILE
from shardvit.data_shards.store.folders import open_folder
from shardvit.data_shards.text import parse_json
from shardvit.launch.slurm.records import begin_jobs
from shardvit.launch.slurm.script import Paths, packing_script
from shardvit.launch.slurm.site import SlurmJob
from shardvit.launch.slurm.submission import Job, SubmissionPlan, package_folder
from shardvit.pipeline.recipe.vocabulary import StageName

PACKING_FILE = "packing.json"
_COMMAND = ("-m", "shardvit.launch.cli", "pack")


def jobs_folder(out: str, *, runs: Path) -> Path:
    """Locate the folder of scripts, logs and records."""
    if is_local(out):
        place = local_path(out).absolute()
        return place.with_name(f"{place.name}.jobs")
    return runs.absolute() / f"{out.rstrip('/').rpartition('/')[2]}.jobs"


def is_packed(out: str) -> bool:
    """True if the set is complete: its manifest comes last."""
    return open_folder(out).size(f"train/{MANIFEST_FILE}") is not None


def packing_of(folder: Path) -> tuple[Path, str] | None:
    """Return (jobs folder, OUT) of a packing that was submitted; `folder` is either of them. None: there is none."""
    for jobs in (folder, jobs_folder(str(folder), runs=Path())):
        if (found := _submitted(jobs)) is not None:
            return jobs, found["out"]
    return None


def _submitted(jobs: Path) -> dict[str, Any] | None:
    file = jobs / PACKING_FILE
    try:
        found = parse_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("out"), str):
        raise UserError(f"{file}: it is damaged; remove it")
    return found


def plan_packing_jobs(
    source: str, out: str, flags: Sequence[str], *, tasks: int, at_once: int | None, runs: Path, job: SlurmJob
) -> SubmissionPlan:
    """Render the scripts of what is not done; changes nothing on disk. `flags`: of `shardvit pack`."""
    paths = Paths(run=jobs_folder(out, runs=runs), work=Path.cwd(), package=package_folder())
    command = [source, out, *flags]
    jobs: list[Job] = []

    def add(name: str, *more: str, array: str = "") -> None:
        step = [*_COMMAND, *command, "--step", name, *more]
        text = packing_script(name, step, job=job, paths=paths, array=array)
        jobs.append(Job(name, paths.slurm / f"{name}.sbatch", text))

    open_tasks = list(range(tasks))
    if not is_packed(out):
        planned = load_job(out)
        is_same = planned is not None and (_submitted(paths.run) or {}).get("command") == command
        records = [*find_records(planned)] if planned is not None and is_same else []
        # With images that could not be read, which were to be mended, the source is another one.
        is_refused = any(record and record.refused for record in records) and "--skip-unreadable" not in flags
        if not records or is_refused:
            add("plan")
        else:
            open_tasks = [task for task in range(tasks) if None in records[task::tasks]]
        if open_tasks:
            limit = f"%{at_once}" if at_once else ""
            add("shards", "--of", str(tasks), array=f"{_ranges(open_tasks)}{limit}")
        add("finish")

    def begin() -> dict[StageName, int]:
        begin_jobs(paths.slurm)
        content = {"out": str(local_path(out).absolute()) if is_local(out) else out, "command": command}
        replace_text(paths.run / PACKING_FILE, json.dumps(content, indent=1))
        return {}

    closing = f"{len(open_tasks)} tasks make shards; logs in {paths.slurm}"
    return SubmissionPlan(paths, job, tuple(jobs), begin, closing=closing)


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5", as sbatch's --array."""
    runs = [[*run] for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)
