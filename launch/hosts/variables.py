"""Choose the environment variables to send to the other hosts, as DeepSpeed does: by prefix, and from `.deepspeed_env`
in the home and working folders (DS_ENV_FILE renames it). Everything else comes from each host's own login."""

import re
from collections.abc import Mapping
from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.launch.local.env import RENDEZVOUS, SUPERVISOR_PID

DEEPSPEED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")  # deepspeed/launcher/runner.py 0.19, with CUDA
PREFIXES = (*DEEPSPEED_PREFIXES, "GLOO_", "TORCH_", "SHARDVIT_", "WDS_")
_OF_THIS_HOST = (SUPERVISOR_PID, RENDEZVOUS)  # set if another run started this one
_FILE = ".deepspeed_env"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def travelling(environ: Mapping[str, str], *, folders: tuple[Path, ...]) -> tuple[dict[str, str], str]:
    """The variables to send (`environ`'s, then those of `.deepspeed_env` in `folders`; later ones win), and a sentence
    with their names only: values may be secret. UserError if a file is malformed."""
    name = environ.get("DS_ENV_FILE", _FILE)
    from_files: dict[str, str] = {}
    files = []
    for path in dict.fromkeys(folder / name for folder in folders):
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}): mend it, or remove it") from None
        from_files.update(parse_environment(text, source=str(path)))
        files.append(str(path))
    inherited = {
        name: value for name, value in environ.items() if name.startswith(PREFIXES) and name not in _OF_THIS_HOST
    }
    sentence = f"variables that go to the hosts: {', '.join(sorted(inherited.keys() - from_files.keys())) or 'none'}"
    if files:
        sentence += f"; from {' and '.join(files)}: {', '.join(sorted(from_files))}"
    return {**inherited, **from_files}, sentence


def parse_environment(text: str, *, source: str) -> dict[str, str]:
    """Read NAME=VALUE lines as DeepSpeed does, but skip empty lines and comments; UserError on any other line."""
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise UserError(f"{source}, line {number}: write NAME=VALUE, one a line, without `export`")
        found[name.strip()] = value.strip()
    return found
