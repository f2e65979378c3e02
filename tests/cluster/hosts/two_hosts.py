"""Two hosts on one machine: two network namespaces joined by a veth pair, each with its own sshd, names and processes.

Each host is a process that has its own network, mounts, process numbers and host name; sshd is number 1 of it, and
killing that is the host's death. The disk is shared, as a cluster's file server is. Names are resolved through a
private /etc/hosts; keys lie in the fixture's folder and the caller's ~/.ssh is not looked at. Needs root, util-linux,
iproute2 and OpenSSH's server.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("alpha", "beta")
_SSHD = "/usr/sbin/sshd"
_NEEDED = (  # with Debian's package
    *(("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")),
    *(("ssh", "openssh-client"), ("ssh-keygen", "openssh-client")),
)
_BEGIN_SECONDS = 240.0


def why_not() -> str:
    """Why there can be no such hosts here; empty: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "two hosts need Linux and root"
    for program, package in _NEEDED:
        if shutil.which(program) is None:
            return f"two hosts need {program} (package {package})"
    if not Path(_SSHD).exists():
        return "two hosts need sshd (package openssh-server)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "--uts", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "this machine allows no namespaces"


@dataclass(frozen=True)
class Difference:
    """How one of the hosts differs from the other."""

    commands: Sequence[str] = ()  # of a shell, in the host's own mounts before its sshd begins


class TwoHosts:
    """The hosts, from `start` to `stop`; `folder` is a fresh one for keys and settings."""

    def __init__(self, folder: Path, *, beta: Difference | None = None) -> None:
        self.folder = folder
        self._differences = {"alpha": Difference(), "beta": beta or Difference()}
        self._mark = uuid.uuid4().hex[:6]
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}

    def address(self, host: str) -> str:
        """A host's address."""
        return f"10.213.77.{1 + NAMES.index(host)}"

    def start(self) -> None:
        """Make the networks, start an sshd on each host, and wait until both answer."""
        self._write_settings()
        for name in NAMES:
            _run("ip", "netns", "add", self._space(name))
        alpha, beta = (("name", "veth0", "netns", self._space(name)) for name in NAMES)
        _run("ip", "link", "add", *alpha, "type", "veth", "peer", *beta)
        for name in NAMES:
            inside = ("ip", "-n", self._space(name))
            _run(*inside, "addr", "add", f"{self.address(name)}/24", "dev", "veth0")
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", "veth0", "up")
            self.boot(name)

    def boot(self, name: str) -> None:
        """Start a host's sshd."""
        difference = self._differences[name]
        script = "\n".join(
            [
                "set -e",
                f"hostname {name}",
                f"mount --bind {self.folder}/hosts /etc/hosts",
                "mount -t tmpfs none /run",  # sshd wants /run/sshd; nothing of the machine's is touched
                "mkdir /run/sshd",
                "mount -t tmpfs none /dev/shm",  # a host's own, as its memory is
                *difference.commands,
                f"exec {_SSHD} -D -e -f {self.folder}/sshd_config_{name} 2>>{self.folder}/sshd_{name}.log",
            ]
        )
        own = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--mount-proc")
        self._sshd[name] = subprocess.Popen(
            ["ip", "netns", "exec", self._space(name), *own, "sh", "-c", script], start_new_session=True
        )
        deadline = time.monotonic() + _BEGIN_SECONDS
        while self._answers(name) != 0:
            if self._sshd[name].poll() is not None or time.monotonic() > deadline:
                log = (self.folder / f"sshd_{name}.log").read_text(encoding="utf-8", errors="replace")
                raise AssertionError(f"{name} does not begin: {log}")
            time.sleep(0.1)

    def die(self, name: str) -> None:
        """As a host that loses its power: all its processes are gone at once."""
        os.killpg(self._sshd[name].pid, signal.SIGKILL)
        self._sshd[name].wait()

    def cut(self) -> None:
        """Pull the cable."""
        _run("ip", "-n", self._space("alpha"), "link", "set", "veth0", "down")

    def mend(self) -> None:
        """Put it back."""
        _run("ip", "-n", self._space("alpha"), "link", "set", "veth0", "up")

    def on(self, name: str, *command: str, folder: Path | None = None) -> list[str]:
        """The command that runs `command` on a host, as from its console."""
        spaces = ("--mount", "--net", "--uts", "--pid")
        return ["nsenter", "--target", str(self._init(name)), *spaces, f"--wdns={folder or Path.cwd()}", *command]

    def environment(self) -> dict[str, str]:
        """What a process on the hosts needs, so that its ssh is the fixture's."""
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def stop(self) -> None:
        """End everything, and take the networks down."""
        for name, process in self._sshd.items():
            if process.poll() is None:
                self.die(name)
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)

    def _space(self, name: str) -> str:
        return f"shardvit-{self._mark}-{name}"

    def _init(self, name: str) -> int:
        """Number 1 of a host, as it is called here."""
        unshare = self._sshd[name].pid  # `ip netns exec` becomes unshare, whose child is the host's first process
        return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])

    def _answers(self, name: str) -> int:
        try:
            command = self.on(name, f"{self.folder}/bin/ssh", "-o", "ConnectTimeout=2", name, "true")
        except (OSError, IndexError):
            return 1
        return subprocess.run(command, capture_output=True).returncode

    def _write_settings(self) -> None:
        (self.folder / "bin").mkdir(parents=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "user_key"))
        shutil.copy(self.folder / "user_key.pub", self.folder / "authorized_keys")
        hosts, known = ["127.0.0.1 localhost"], []
        for name in NAMES:
            key = self.folder / f"host_key_{name}"
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
            hosts.append(f"{self.address(name)} {name}")
            known.append(f"{name} {key.with_suffix('.pub').read_text().strip()}")
            settings = {
                "ListenAddress": self.address(name),
                "HostKey": key,
                "AuthorizedKeysFile": self.folder / "authorized_keys",
                "PidFile": "none",
                "PermitRootLogin": "yes",
                "PasswordAuthentication": "no",
                "UsePAM": "no",
                "StrictModes": "no",  # the folder is a test's
            }
            text = "".join(f"{setting} {value}\n" for setting, value in settings.items())
            (self.folder / f"sshd_config_{name}").write_text(text)
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        (self.folder / "known_hosts").write_text("\n".join(known) + "\n")
        (self.folder / "ssh_config").write_text(
            f"User root\nIdentityFile {self.folder}/user_key\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {self.folder}/known_hosts\nStrictHostKeyChecking yes\n"
        )
        ssh = self.folder / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
