"""The site file: what is the same for every job on one cluster, written once by whoever knows the cluster (TOML).

    modules = ["cuda/12.8"]                     # module load
    setup = ["source ~/envs/vit/bin/activate"]  # further shell lines, as they are
    python = "python3"                          # that has shardvit; default: the one that submits
    srun = ["--cpu-bind=none"]                  # further arguments

    [sbatch]
    partition = "gpu"                           # these four are defaults for submit's options
    account = "vision"
    lines = ["--exclusive"]                     # further #SBATCH lines

    [environment]
    NCCL_SOCKET_IFNAME = "ib0"

    [container]
    image = "images/vit.sqsh"                   # has shardvit and its packages
    mounts = ["/data:/data"]                    # besides the folder of the runs and the present one
    runtime = "pyxis"                           # or apptainer

Everything is optional, unknown keys are errors. `setup` is the only place for shell code; all else is quoted.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from data_shards.errors import UserError
from launch.slurm.options import table
from pipeline.recipe.base import Strict


def _one_line(text: str) -> str:
    if not text or re.search(r"[\n\r\0]", text):
        raise ValueError("it must be one line of text")
    return text


def _option(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError(f"{text!r} is no option: it must begin with - as on sbatch's command line")
    return _one_line(text)


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if "\0" in value or "\n" in value:
            raise ValueError(f"{name} must be one line of text")
    return values


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
    """The container in which the processes run; shardvit is installed in it."""

    image: Line
    mounts: tuple[Line, ...] = ()
    runtime: Literal["pyxis", "apptainer"] = "pyxis"


class Site(Strict):
    """One cluster."""

    modules: tuple[Line, ...] = ()
    setup: tuple[Line, ...] = ()
    python: Line | None = None
    srun: tuple[Option, ...] = ()
    sbatch: SbatchSite = SbatchSite()  # pyright: ignore[reportInvalidTypeForm]
    environment: Annotated[dict[str, str], AfterValidator(_variables)] = Field(default_factory=dict)
    container: ContainerSite | None = None


def read_site(path: Path | None) -> Site:
    """The site file; without one, nothing is special.

    Raises:
        UserError: it is not there, or says something that is not understood.
    """
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
        problems = [_problem(detail) for detail in error.errors(include_url=False)]
        raise UserError(f"--site: {path}: " + "; ".join(problems)) from None


def _problem(detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    match detail["type"]:
        case "extra_forbidden":
            groups: dict[str, type[BaseModel]] = {"sbatch": SbatchSite, "container": ContainerSite}
            known = Site if len(location) == 1 else groups[location[0]]
            close = difflib.get_close_matches(location[-1], known.model_fields, n=1)
            return f"unknown key {key}" + (f", did you mean {close[0]}?" if close else "")
        case "missing":
            return f"key {key} is missing"
        case "value_error":
            return f"{key}: {detail['ctx']['error']}"
        case _:
            return f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
