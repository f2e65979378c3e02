"""Run Python on another host, lines in and lines out. Only this file starts ssh, one process per host.

`ssh HOST` must work without a prompt; users, ports and jump hosts belong in ~/.ssh/config. The other side runs the same
Python in the same folder. Input travels through standard input: no shell quoting, no secrets in a process list.
"""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from shardvit.data_shards.working_folder import SAFE_PATH
from shardvit.launch.local.processes import join_thread

_DRAIN_SECONDS = 1.0
_NO_FOLDER, _NO_PYTHON, _SSH_FAILED = 96, 97, 255
_OPTIONS = {
    "BatchMode": "yes",  # never prompt: nobody would see it
    "ConnectTimeout": "30",  # includes sshd's banner, late on a busy host
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    "LogLevel": "ERROR",
}


def ssh_command(host: str, python_arguments: Sequence[str], *, python_path: str, folder: Path) -> list[str]:
    """Build the command that runs this Python in `folder` on a host; an empty `python_path` sets no PYTHONPATH."""
    python = shlex.quote(sys.executable)
    environment = {**SAFE_PATH, **({"PYTHONPATH": python_path} if python_path else {})}
    names = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    script = (
        f"cd {shlex.quote(str(folder))} || exit {_NO_FOLDER}; test -x {python} || exit {_NO_PYTHON}; "
        f"exec env {names} {python} {shlex.join(python_arguments)}"
    )
    options = [part for name, value in _OPTIONS.items() for part in ("-o", f"{name}={value}")]
    return ["ssh", "-T", *options, host, f"exec sh -c {shlex.quote(script)}"]


class Connection:
    """Python on a host, in the current folder. `on_line` receives each line it prints, in another thread."""

    def __init__(
        self, host: str, python_arguments: Sequence[str], *, python_path: str, on_line: Callable[[str], None]
    ) -> None:
        self.host, self._on_line = host, on_line
        self._folder = Path(os.getcwd())
        self._last_line = ""
        self._sending = threading.Lock()
        self._process = subprocess.Popen(
            ssh_command(host, python_arguments, python_path=python_path, folder=self._folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # we handle Ctrl-C ourselves
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"ssh-{host}")
        self._reader.start()

    def send(self, text: str) -> None:
        """Write to its standard input; dropped if the connection is lost."""
        assert self._process.stdin is not None
        with self._sending, suppress(OSError, ValueError):
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()

    def code(self) -> int | None:
        """The exit code, once it has ended and `on_line` has had all its lines."""
        code = self._process.poll()
        if code is not None:
            join_thread(self._reader, seconds=_DRAIN_SECONDS)
        return code

    def failure(self) -> str:
        """Say why ssh or the Python there failed to start, or was lost."""
        code, said = self.code(), f" ({self._last_line})" if self._last_line else ""
        return {
            None: f"{self.host} does not answer",
            _SSH_FAILED: f"{self.host} is not reachable{said}: `ssh {self.host} true` has to work without a prompt",
            _NO_FOLDER: f"{self.host} has no folder {self._folder}: start from one that all hosts share",
            _NO_PYTHON: f"{self.host} has no {sys.executable}: install the same environment at the same path",
        }.get(code, f"{self.host}: what was started there ended with exit code {code}{said}")

    def close(self) -> None:
        """Kill ssh, which closes the other side's standard input."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):  # closed in the meantime
            for raw in self._process.stdout:
                line = raw.decode(errors="replace").rstrip("\r\n")
                self._last_line = line.strip() or self._last_line
                self._on_line(line)
