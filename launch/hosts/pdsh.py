"""`--launcher pdsh`: the `deepspeed` command over all hosts, and the files that it reads. Pure.

DeepSpeed passes arguments and variables to a shell on each host (deepspeed/launcher/multinode_runner.py 0.19): those
with a space get double quotes, others none, and variables appear in the command line, where every user can read them.
What cannot be passed like that is refused; `--launcher ssh` has neither problem.
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
    """A hostfile with the highest used slot on each host; `include_text` says which ones are used."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in fleet.hosts)


def include_text(fleet: Fleet) -> str:
    """What DeepSpeed's --include says."""
    return "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in fleet.hosts)


def environment_text(variables: Mapping[str, str]) -> str:
    """The file for DS_ENV_FILE; raises UserError if DeepSpeed would change a value."""
    for name, value in variables.items():
        if '"' in value or _SPECIAL_IN_QUOTES.search(value):
            raise UserError(
                f"the variable {name} holds a character that DeepSpeed's pdsh launcher cannot pass on: use "
                "--launcher ssh"
            )
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def command(
    fleet: Fleet, rank_arguments: Sequence[str], *, hostfile: Path, master_addr: str, master_port: int
) -> list[str]:
    """The `deepspeed` command; raises UserError if its pdsh launcher would change an argument."""
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
            f"{text!r} holds a space and a character of the shell, which DeepSpeed's pdsh launcher cannot pass on: "
            "use --launcher ssh"
        )
    return text
