"""The site file: settings shared by all jobs of a cluster, written once (TOML).

    modules = ["cuda/12.8"]                     # module load
    setup = ["source ~/envs/vit/bin/activate"]  # more shell lines, verbatim
    python = "python3"                          # one that has shardvit; default: the one that submits
    srun = ["--cpu-bind=none"]                  # more arguments

    [sbatch]
    partition = "gpu"                           # default of submit's option; also account, qos, constraint
    account = "vision"
    lines = ["--exclusive"]                     # more #SBATCH lines

    [environment]
    NCCL_SOCKET_IFNAME = "ib0"

    [container]
    image = "images/vit.sqsh"                   # has shardvit and its packages
    mounts = ["/data:/data"]                    # in addition to the runs' folder and the current one
    runtime = "pyxis"                           # or apptainer

Everything is optional; unknown keys are errors. Only `setup` holds shell code; everything else is quoted.
"""

import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, create_model

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.job_options import JobOptions, limit_seconds, table
from shardvit.pipeline.recipe.duration import Strict
from shardvit.pipeline.recipe.mistakes import mistakes


def _one_line(text: str) -> str:
    if not text or re.search(r"[\n\r\0]", text):
        raise ValueError("it must be one line of text")
    return text


def _option(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError(f"{text!r} is not an option: it must begin with - as on sbatch's command line")
    return _one_line(text)


def _variables(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not a name of an environment variable")
        if not isinstance(value, str) or "\0" in value or "\n" in value:
            raise ValueError(f"{name} must be one line of text, in quotes")
    return values


_MOST_SIGNAL_SECONDS = 65_535  # SLURM's limit
Line = Annotated[str, AfterValidator(_one_line)]
Option = Annotated[str, AfterValidator(_option)]


_DefaultOption = Line | None
_DEFAULTS: dict[str, Any] = {name: (_DefaultOption, None) for name, entry in table().items() if entry.in_site}
SbatchSite = create_model(
    "SbatchSite",
    __base__=Strict,
    lines=(tuple[Option, ...], ()),
    **_DEFAULTS,
)


class ContainerSite(Strict):
    """The container of the processes; it has shardvit installed."""

    image: Line
    mounts: tuple[Line, ...] = ()
    runtime: Literal["pyxis", "apptainer"] = "pyxis"


class Site(Strict):
    """Settings of one cluster."""

    modules: tuple[Line, ...] = ()
    setup: tuple[Line, ...] = ()
    python: Line | None = None
    srun: tuple[Option, ...] = ()
    sbatch: SbatchSite = SbatchSite()  # pyright: ignore[reportInvalidTypeForm]
    environment: Annotated[dict[str, Any], AfterValidator(_variables)] = Field(default_factory=dict)
    container: ContainerSite | None = None


def read_site(path: Path | None) -> Site:
    """Read the site file; None: defaults. UserError if it is unreadable or has an unknown key or a wrong value."""
    if path is None:
        return Site()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--site: {path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--site: {path} is not valid TOML: {error}") from None
    try:
        return Site.model_validate(content)
    except ValidationError as error:
        found = mistakes(error, tree=content, root=Site)
        raise UserError(f"--site: {path}: " + "; ".join(mistake.text for mistake in found)) from None


@dataclass(frozen=True)
class SlurmJob:
    """A run's job options, completed from the site file, and the site."""

    options: JobOptions
    site: Site = field(default_factory=Site)

    @property
    def tasks_per_node(self) -> int:
        return self.options.tasks_per_node or self.options.gpus_per_node

    @property
    def processes(self) -> int:
        return self.options.nodes * self.tasks_per_node

    @property
    def limit_seconds(self) -> int:
        return limit_seconds(self.options.time)


def job_of(options: JobOptions, *, site: Site) -> SlurmJob:
    """Check `options` and complete them from the site; UserError if they contradict each other."""
    options.check()
    if options.gpus_per_node and options.tasks_per_node not in (None, options.gpus_per_node):
        raise UserError(
            f"--tasks-per-node: it is {options.tasks_per_node}, but every GPU has one process: leave it out, or give "
            "--gpus-per-node 0 to train on CPUs"
        )
    if not options.gpus_per_node and options.tasks_per_node is None:
        raise UserError("--gpus-per-node: give the GPUs of a node, or for a cluster without GPUs --tasks-per-node")
    limit = limit_seconds(options.time)
    if options.signal_seconds >= min(limit, _MOST_SIGNAL_SECONDS + 1):
        raise UserError(
            f"--signal-seconds: it is {options.signal_seconds}, and the job has {limit} seconds (--time "
            f"{options.time}): the signal to save must come before the end, and after the start"
        )
    if options.container is not None:
        container = site.container or ContainerSite(image=options.container)
        container = container.model_copy(update={"image": options.container})
        site = site.model_copy(update={"container": container})
    completed = {
        name: getattr(options, name) or getattr(site.sbatch, name) for name, entry in table().items() if entry.in_site
    }
    return SlurmJob(replace(options, tasks_per_node=options.tasks_per_node or options.gpus_per_node, **completed), site)
