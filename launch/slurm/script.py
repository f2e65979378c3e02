"""Render a stage, or a step of a sweep, as a batch script from `templates/`. Pure; every value is quoted."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from data_shards.working_folder import SAFE_PATH
from launch.slurm.job_options import limit_seconds
from launch.slurm.site import ContainerSite, SlurmJob
from pipeline.recipe.vocabulary import EXIT_STOPPED, RECIPE_FILE, StageName

_TEMPLATE = Path(__file__).with_name("templates") / "stage.sbatch.jinja"
_STEP_TEMPLATE = _TEMPLATE.with_name("step.sbatch.jinja")
_WAIT_SECONDS = 120  # after the first process has ended: saving is over by then, MLflow may still be told the rest
_REQUEUE_SECONDS = 5  # before the time limit: to decide, and to tell SLURM


@dataclass(frozen=True)
class Paths:
    """Absolute paths, the same on all nodes."""

    run: Path  # RUNS/NAME
    work: Path  # where relative paths in the recipe start
    package: Path | None  # to import shardvit from; None: it is installed

    @property
    def slurm(self) -> Path:
        """The run folder's part for SLURM: scripts, logs, records."""
        return self.run / "slurm"

    @property
    def recipe(self) -> Path:
        return self.slurm / RECIPE_FILE

    def script(self, stage: StageName) -> Path:
        return self.slurm / f"{stage}.sbatch"

    def log(self, stage: StageName) -> Path:
        """Output of a stage's processes, over all its jobs."""
        return self.slurm / f"{stage}.log"


class _Shell(str):
    """A word of a command that is shell code already."""


@dataclass(frozen=True)
class Tasks:
    """The runs of a job array, one task each: folders in `Paths.run`, which is a sweep's."""

    names: Sequence[str]
    at_once: int | None = None  # so many run at a time; None: all

    @property
    def option(self) -> str:
        """The option for sbatch."""
        return f"--array=0-{len(self.names) - 1}" + (f"%{self.at_once}" if self.at_once else "")


def stage_script(stage: StageName, *, job: SlurmJob, paths: Paths, tasks: Tasks | None = None) -> str:
    """The text of a stage's batch script; with `tasks`, of an array that has the stage of each of these runs."""
    python = _python(job)
    inside = _inside(job, paths=paths)
    run: str = str(paths.run) if tasks is None else _Shell('"$run"')
    recipe = str(paths.recipe) if tasks is None else _Shell(f'"$run"/slurm/{RECIPE_FILE}')
    runs = paths.run.parent if tasks is None else paths.run
    after = [*inside, python, "-m", "launch.slurm.after", run]
    rest = ["--stage", stage, "--max-restarts", str(job.options.max_restarts)]
    return _render(
        _TEMPLATE,
        job=job,
        paths=paths,
        stage=stage,
        options=_options(stage, job=job, paths=paths, tasks=tasks),
        tasks=() if tasks is None else tasks.names,
        job_id="$SLURM_JOB_ID" if tasks is None else "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
        train=_command(
            _srun(stage, job, paths=paths, how="train"),
            [*inside, python, "-u", "-m", "launch.train", recipe, "--stage", stage],
            ["--runs", str(runs)],
        ),
        # If shardvit is only in the container, one more task asks there.
        after=_command(*([_srun(stage, job, paths=paths, how="ask")] if job.site.container else []), after, rest),
        patience_seconds=max(1, job.options.signal_seconds - _REQUEUE_SECONDS),
        exit_requeue=EXIT_STOPPED,
    )


def step_script(name: str, command: Sequence[str], *, job: SlurmJob, paths: Paths) -> str:
    """The text of a batch script that runs Python's `command` once, in one process: of a sweep, whose folder is
    `paths.run`."""
    stage: StageName = "swap_head"  # what it asks for is as small
    asked = [f"--{entry.flag}={text}" for entry, text in job.options.flags(stage=stage)]
    names = {
        "job-name": f"{paths.run.name}-{name}",
        "chdir": paths.work,
        "output": _pattern(paths.slurm / f"{name}.log"),
    }
    named = [f"--{option}={value}" for option, value in names.items()]
    options = _lines([*named, *asked, "--open-mode=append", "--requeue", *job.site.sbatch.lines])
    within = [_srun(stage, job, paths=paths, how="ask")] if job.site.container else []
    words = [*_inside(job, paths=paths), _python(job), "-u", *command]
    return _render(_STEP_TEMPLATE, job=job, paths=paths, options=options, name=name, command=_command(*within, words))


def _python(job: SlurmJob) -> str:
    return job.site.python or ("python3" if job.site.container else sys.executable)


def _render(template: Path, *, job: SlurmJob, paths: Paths, options: Sequence[str], **values: object) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=False,  # it is shell, not HTML, and quoted by `q`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = shlex.quote
    environment.filters["comment"] = lambda value: " ".join(str(value).split())
    return environment.get_template(template.name).render(
        run_folder=paths.run,
        options=[shlex.join([option]) for option in options],
        modules=job.site.modules,
        setup=job.site.setup,
        environment={
            "PYTHONUNBUFFERED": "1",
            **SAFE_PATH,
            **({} if job.options.gpus_per_node else {"DS_ACCELERATOR": "cpu"}),
            **job.site.environment,
        },
        package_folder=None if job.site.container or paths.package is None else str(paths.package),
        **values,
    )


def _options(stage: StageName, *, job: SlurmJob, paths: Paths, tasks: Tasks | None) -> list[str]:
    asked = {entry.flag: text for entry, text in job.options.flags(stage=stage)}
    options = {
        "job-name": f"{paths.run.name}-{stage}",
        **asked,
        "chdir": paths.work,
        "output": _pattern(paths.log(stage)) if tasks is None else _pattern(paths.slurm / stage) + "-%a.log",
        "open-mode": "append",
        "signal": f"B:USR1@{min(job.options.signal_seconds, limit_seconds(asked['time']) - 1)}",
    }
    lines = _lines([f"--{name}={value}" for name, value in options.items()])
    return [*lines, *([] if tasks is None else [tasks.option]), "--requeue", *job.site.sbatch.lines]


def _lines(options: list[str]) -> list[str]:
    for line in options:
        if "\n" in line or "\r" in line:
            raise UserError(f"{line.splitlines()[0]}: a line break cannot stand in a batch script")
    return options


def _pattern(path: Path) -> str:
    """Escape a path for sbatch's --output."""
    return str(path).replace("%", "%%")


def _srun(stage: StageName, job: SlurmJob, *, paths: Paths, how: Literal["train", "ask"]) -> list[str]:
    """srun for a stage's processes, or for the one that asks what becomes of the job."""
    nodes, tasks = (1, 1) if how == "ask" or stage == "swap_head" else (job.options.nodes, job.processes)
    passed_on = [f"--{entry.flag}={text}" for entry, text in job.options.flags(stage=stage) if entry.srun]
    command = ["srun", f"--nodes={nodes}", f"--ntasks={tasks}", "--distribution=block", *passed_on]
    command += ["--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}", *job.site.srun]
    if job.site.container is not None and job.site.container.runtime == "pyxis":
        command += [
            f"--container-image={job.site.container.image}",
            f"--container-mounts={','.join(_mounts(job.site.container, paths))}",
            f"--container-workdir={paths.work}",
        ]
    return command


def _inside(job: SlurmJob, *, paths: Paths) -> list[str]:
    if job.site.container is None or job.site.container.runtime != "apptainer":
        return []
    binds = [f"--bind={mount}" for mount in _mounts(job.site.container, paths)]
    nv = ["--nv"] if job.options.gpus_per_node else []
    return ["apptainer", "exec", *nv, *binds, f"--pwd={paths.work}", job.site.container.image]


def _mounts(container: ContainerSite, paths: Paths) -> list[str]:
    """The site's mounts, and the two folders named in the script, under the same paths inside."""
    return [*(f"{folder}:{folder}" for folder in dict.fromkeys((paths.work, paths.run.parent))), *container.mounts]


def _command(*parts: Sequence[str]) -> str:
    """Join a command's parts, one a line."""
    return " \\\n    ".join(" ".join(w if isinstance(w, _Shell) else shlex.quote(w) for w in part) for part in parts)
