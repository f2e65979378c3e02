"""Choose the environment variables for the other hosts by DeepSpeed's rule and its file `.deepspeed_env`.

Those of `shardvit run` with one of `PREFIXES`, then those in `.deepspeed_env` of the home and the working folder
(DS_ENV_FILE renames it); later ones win. A host has everything else from its own login.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_shards.errors import UserError
from launch.local.env import RENDEZVOUS, SUPERVISOR_PID

DEEPSPEED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")  # deepspeed/launcher/runner.py 0.19, with CUDA
PREFIXES = (*DEEPSPEED_PREFIXES, "GLOO_", "TORCH_", "SHARDVIT_", "WDS_")
_OF_THIS_HOST = (SUPERVISOR_PID, RENDEZVOUS)  # of a run around this one
_FILE = ".deepspeed_env"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Variables:
    """The variables for the other hosts."""

    inherited: dict[str, str]  # from the environment
    from_files: dict[str, str]
    files: tuple[str, ...]

    @property
    def all(self) -> dict[str, str]:
        return {**self.inherited, **self.from_files}

    def describe(self) -> str:
        """Names only: values may be secret."""
        inherited = ", ".join(sorted(name for name in self.inherited if name not in self.from_files)) or "none"
        files = f"; from {' and '.join(self.files)}: {', '.join(sorted(self.from_files))}" if self.files else ""
        return f"variables that go to the hosts: {inherited}{files}"


def travelling(environ: Mapping[str, str], *, folders: tuple[Path, ...]) -> Variables:
    """The variables for the other hosts, from this process, then from `.deepspeed_env` in `folders`; later ones win.
    Raises UserError if a line of such a file cannot be read."""
    name = environ.get("DS_ENV_FILE", _FILE)
    found: dict[str, str] = {}
    files = []
    for path in dict.fromkeys(folder / name for folder in folders):
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}): mend it, or remove it") from None
        found.update(parse_environment(text, source=str(path)))
        files.append(str(path))
    inherited = {
        name: value for name, value in environ.items() if name.startswith(PREFIXES) and name not in _OF_THIS_HOST
    }
    return Variables(inherited, found, tuple(files))


def parse_environment(text: str, *, source: str) -> dict[str, str]:
    """NAME=VALUE lines, read as DeepSpeed does, but skipping empty lines and comments; UserError: any other line."""
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise UserError(f"{source}, line {number}: write NAME=VALUE, one a line, without `export`")
        found[name.strip()] = value.strip()
    return found
