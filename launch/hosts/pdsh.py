"""`--launcher pdsh`: the `deepspeed` command itself, over all hosts; what it needs said in its own way. Pure.

DeepSpeed hands arguments and variables to a shell on each host (deepspeed/launcher/multinode_runner.py 0.19): arguments
with a space get double quotes, others none, and the values of variables stand in the command line, where every user of
the hosts can read them. `--launcher ssh` has neither trouble. What cannot be said through that is refused.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_shards.errors import UserError
from launch.hosts.hostfile import Fleet

_SPECIAL_IN_QUOTES = re.compile(r"[$`\\!\n]")


def hostfile_text(fleet: Fleet) -> str:
    """A hostfile with as many slots on each host as the highest one that is used; `include_text` says which."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in fleet.hosts)


def include_text(fleet: Fleet) -> str:
    """What DeepSpeed's --include says."""
    return "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in fleet.hosts)


def environment_text(variables: Mapping[str, str]) -> str:
    """A file as DS_ENV_FILE names it.

    Raises:
        UserError: a value that DeepSpeed would not hand on as it is.
    """
    for name, value in variables.items():
        if '"' in value or _SPECIAL_IN_QUOTES.search(value):
            raise UserError(
                f"the variable {name} holds a character that DeepSpeed's pdsh launcher cannot hand on: use "
                "--launcher ssh"
            )
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def command(
    fleet: Fleet, rank_arguments: Sequence[str], *, hostfile: Path, master_addr: str, master_port: int
) -> list[str]:
    """The `deepspeed` command.

    Raises:
        UserError: an argument that its pdsh launcher would not hand on as it is.
    """
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical"),
        *("--hostfile", str(hostfile), "--include", include_text(fleet), "--force_multi", "--no_ssh_check"),
        *("--launcher", "pdsh", "--master_addr", master_addr, "--master_port", str(master_port)),
        *("--no_local_rank", "--module", "launch.train", *map(_argument, rank_arguments)),
    ]


def _argument(text: str) -> str:
    if " " not in text:
        return shlex.quote(text)
    if _SPECIAL_IN_QUOTES.search(text):
        raise UserError(
            f"{text!r} holds a space and a character of the shell, which DeepSpeed's pdsh launcher cannot hand on: "
            "use --launcher ssh"
        )
    return text
