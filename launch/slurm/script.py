"""One stage as a batch script: renders `templates/stage.sbatch.jinja`. Pure; every value is quoted."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from launch.slurm.options import limit_seconds
from launch.slurm.site import ContainerSite, SlurmJob
from pipeline.vocabulary import EXIT_STOPPED, RECIPE_FILE, StageName

_TEMPLATE = Path(__file__).with_name("templates") / "stage.sbatch.jinja"
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


def stage_script(stage: StageName, *, job: SlurmJob, paths: Paths) -> str:
    """The text of a stage's batch script."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=False,  # it is shell, not HTML, and quoted by `q`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = shlex.quote
    environment.filters["comment"] = lambda value: " ".join(str(value).split())
    python = job.site.python or ("python3" if job.site.container else sys.executable)
    inside = _inside(job, paths=paths)
    after = [*inside, python, "-m", "launch.slurm.after", str(paths.run)]
    rest = ["--stage", stage, "--max-restarts", str(job.options.max_restarts)]
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        stage=stage,
        run_folder=paths.run,
        options=[shlex.join([option]) for option in _options(stage, job=job, paths=paths)],
        modules=job.site.modules,
        setup=job.site.setup,
        environment={
            "PYTHONUNBUFFERED": "1",
            **({} if job.options.gpus_per_node else {"DS_ACCELERATOR": "cpu"}),
            **job.site.environment,
        },
        package_folder=None if job.site.container or paths.package is None else str(paths.package),
        train=_command(
            _srun(stage, job, paths=paths, how="train"),
            [*inside, python, "-u", "-m", "launch.train", str(paths.recipe), "--stage", stage],
            ["--runs", str(paths.run.parent)],
        ),
        # If shardvit is only in the container, one more task asks there.
        after=_command(*([_srun(stage, job, paths=paths, how="ask")] if job.site.container else []), after, rest),
        patience_seconds=max(1, job.options.signal_seconds - _REQUEUE_SECONDS),
        exit_requeue=EXIT_STOPPED,
    )


def _options(stage: StageName, *, job: SlurmJob, paths: Paths) -> list[str]:
    asked = {entry.flag: text for entry, text in job.options.flags(stage=stage)}
    options = {
        "job-name": f"{paths.run.name}-{stage}",
        **asked,
        "chdir": paths.work,
        "output": str(paths.log(stage)).replace("%", "%%"),
        "open-mode": "append",
        "signal": f"B:USR1@{min(job.options.signal_seconds, limit_seconds(asked['time']) - 1)}",
    }
    lines = [f"--{name}={value}" for name, value in options.items()]
    for line in lines:
        if "\n" in line or "\r" in line:
            raise UserError(f"{line.splitlines()[0]}: a line break cannot stand in a batch script")
    return [*lines, "--requeue", *job.site.sbatch.lines]


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
    """A command over several lines, each a part."""
    return " \\\n    ".join(shlex.join(part) for part in parts)
