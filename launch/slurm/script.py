"""Render a stage, or a step of a sweep, as a batch script from `templates/`. Pure; quotes every value."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.working_folder import SAFE_PATH
from shardvit.launch.slurm.job_options import limit_seconds
from shardvit.launch.slurm.site import ContainerSite, SlurmJob
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED, RECIPE_FILE, StageName

_WAIT_SECONDS = 120  # after the first process exits: by then all have saved, but may still send to MLflow
_REQUEUE_SECONDS = 5  # before the time limit, to decide and requeue


@dataclass(frozen=True)
class Paths:
    """Absolute paths, identical on all nodes."""

    run: Path  # RUNS/NAME
    work: Path  # relative paths in the recipe start here
    package: Path | None  # to import shardvit from; None: installed

    @property
    def slurm(self) -> Path:
        """Folder of scripts, logs and records."""
        return self.run / "slurm"

    @property
    def recipe(self) -> Path:
        return self.slurm / RECIPE_FILE

    def script(self, stage: StageName) -> Path:
        return self.slurm / f"{stage}.sbatch"

    def log(self, stage: StageName) -> Path:
        return self.slurm / f"{stage}.log"


class _Shell(str):
    """Shell code, not to be quoted."""


@dataclass(frozen=True)
class Tasks:
    """The runs of a job array, one task each: subfolders of the sweep's folder, `Paths.run`."""

    names: Sequence[str]
    at_once: int | None = None  # maximum running at a time; None: no limit

    @property
    def option(self) -> str:
        return f"--array=0-{len(self.names) - 1}" + (f"%{self.at_once}" if self.at_once else "")


def stage_script(stage: StageName, *, job: SlurmJob, paths: Paths, tasks: Tasks | None = None) -> str:
    """Render a stage's batch script; with `tasks`, one for a job array over these runs."""
    python, inside = _python(job), _inside(job, paths=paths)
    run: str = str(paths.run) if tasks is None else _Shell('"$run"')
    recipe = str(paths.recipe) if tasks is None else _Shell(f'"$run"/slurm/{RECIPE_FILE}')
    runs = paths.run.parent if tasks is None else paths.run
    limit = next(limit_seconds(text) for entry, text in job.options.flags(stage=stage) if entry.flag == "time")
    more = [f"--signal=B:USR1@{min(job.options.signal_seconds, limit - 1)}", *([] if tasks is None else [tasks.option])]
    return _render(
        "stage",
        job=job,
        paths=paths,
        stage=stage,
        options=_options(stage, stage, job=job, paths=paths, log=stage if tasks is None else f"{stage}-%a", more=more),
        tasks=() if tasks is None else tasks.names,
        job_id="$SLURM_JOB_ID" if tasks is None else "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
        train=_command(
            _srun(stage, job, paths=paths, how="train"),
            [*inside, python, "-u", "-m", "shardvit.launch.train", recipe, "--stage", stage],
            ["--runs", str(runs), "--own-code", "recorded"],
        ),
        after=_command(
            *_asking(stage, job, paths=paths),
            [*inside, python, "-m", "shardvit.launch.slurm.after", run],
            ["--stage", stage, "--max-restarts", str(job.options.max_restarts)],
        ),
        patience_seconds=max(1, job.options.signal_seconds - _REQUEUE_SECONDS),
        exit_requeue=EXIT_STOPPED,
    )


def step_script(name: str, command: Sequence[str], *, job: SlurmJob, paths: Paths) -> str:
    """Render the batch script that runs Python with `command` in one process, for the sweep in `paths.run`."""
    stage: StageName = "swap_head"  # same small job
    words = [*_inside(job, paths=paths), _python(job), "-u", *command]
    return _render(
        "step",
        job=job,
        paths=paths,
        options=_options(name, stage, job=job, paths=paths, log=name),
        name=name,
        command=_command(*_asking(stage, job, paths=paths), words),
    )


def packing_script(name: str, command: Sequence[str], *, job: SlurmJob, paths: Paths, array: str = "") -> str:
    """Render the batch script of a step of a packing; with `array`, sbatch's list of tasks, each gets `--task`."""
    stage: StageName = "pretrain"  # as much as one asks for
    words = [*_inside(job, paths=paths), _python(job), "-u", *command]
    signal_seconds = min(job.options.signal_seconds, job.limit_seconds - 1)
    more = [f"--signal=B:USR1@{signal_seconds}", *([f"--array={array}"] if array else [])]
    return _render(
        "packing",
        job=job,
        paths=paths,
        options=_options(name, stage, job=job, paths=paths, log=f"{name}-%a" if array else name, more=more),
        name=name,
        job_id="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if array else "$SLURM_JOB_ID",
        command=_command(
            *_asking(stage, job, paths=paths),
            [*words, *(("--task", _Shell('"$SLURM_ARRAY_TASK_ID"')) if array else ())],
        ),
        max_restarts=job.options.max_restarts,
        exit_requeue=EXIT_STOPPED,
    )


def _python(job: SlurmJob) -> str:
    return job.site.python or ("python3" if job.site.container else sys.executable)


def _render(template: str, *, job: SlurmJob, paths: Paths, options: Sequence[str], **values: object) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=False,  # shell, not HTML; `q` quotes
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = shlex.quote
    environment.filters["comment"] = lambda value: " ".join(str(value).split())
    return environment.get_template(f"{template}.sbatch.jinja").render(
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


def _options(
    name: str, stage: StageName, *, job: SlurmJob, paths: Paths, log: str, more: Sequence[str] = ()
) -> list[str]:
    output = str(paths.slurm).replace("%", "%%") + f"/{log}.log"  # sbatch expands %
    options = [
        f"--job-name={paths.run.name}-{name}",
        *(f"--{entry.flag}={text}" for entry, text in job.options.flags(stage=stage)),
        *(f"--chdir={paths.work}", f"--output={output}", "--open-mode=append", *more),
        *("--requeue", *job.site.sbatch.lines),
    ]
    for line in options:
        if "\n" in line or "\r" in line:
            raise UserError(f"{line.splitlines()[0]}: a line break cannot stand in a batch script")
    return options


def _asking(stage: StageName, job: SlurmJob, *, paths: Paths) -> list[list[str]]:
    """srun with one task if only the container has shardvit."""
    return [_srun(stage, job, paths=paths, how="ask")] if job.site.container else []


def _srun(stage: StageName, job: SlurmJob, *, paths: Paths, how: Literal["train", "ask"]) -> list[str]:
    """srun for a stage's processes, or for the one that decides about requeueing."""
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
    return [*(f"{folder}:{folder}" for folder in dict.fromkeys((paths.work, paths.run.parent))), *container.mounts]


def _command(*parts: Sequence[str]) -> str:
    return " \\\n    ".join(" ".join(w if isinstance(w, _Shell) else shlex.quote(w) for w in part) for part in parts)
