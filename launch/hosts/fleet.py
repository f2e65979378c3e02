"""The hosts of one `shardvit run --hostfile`, as the command line names them. Reads the hostfile; asks no host."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_shards.errors import UserError
from launch.hosts.hostfile import Host, num_slots, parse_hostfile, select

Launcher = Literal["ssh", "pdsh"]


@dataclass(frozen=True)
class Fleet:
    """What to start the ranks on, and how.

    Attributes:
        hosts: in the order of ranks.
        source: the hostfile.
        launcher: ssh: one connection a host starts DeepSpeed's launcher there. pdsh: the `deepspeed` command does it.
        master_addr: under which the others find the first host; empty: found out before the start.
        master_port: on which rank 0 listens; 0: one that the first host's system chooses.
    """

    hosts: tuple[Host, ...]
    source: Path
    launcher: Launcher = "ssh"
    master_addr: str = ""
    master_port: int = 0

    @property
    def processes(self) -> int:
        """How many ranks there are."""
        return num_slots(self.hosts)


def open_fleet(
    hostfile: Path,
    *,
    include: str = "",
    exclude: str = "",
    launcher: Launcher = "ssh",
    master_addr: str = "",
    master_port: int = 0,
) -> Fleet:
    """Read the hostfile.

    Raises:
        UserError: it cannot be read, an option does not fit it, or the launcher is not installed here.
    """
    try:
        text = hostfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"--hostfile {hostfile} cannot be read ({why}): name a file of lines HOST slots=8") from None
    hosts = select(parse_hostfile(text, source=str(hostfile)), include=include, exclude=exclude, source=str(hostfile))
    for program in ("ssh", *(["pdsh"] if launcher == "pdsh" else [])):
        if shutil.which(program) is None:
            advice = "install it, or use --launcher ssh" if program == "pdsh" else "install OpenSSH's client"
            raise UserError(f"--launcher {launcher}: there is no {program} on this machine: {advice}")
    if not 0 <= master_port < 65536:
        raise UserError(f"--master-port: it is {master_port}; give 1 to 65535, or leave it out")
    return Fleet(hosts, hostfile, launcher=launcher, master_addr=master_addr, master_port=master_port)
