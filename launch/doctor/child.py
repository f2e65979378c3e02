"""Run programs that may crash, hang or be missing in child processes; each outcome is an answer.

Each child has its own session, killed at the end. Output goes to files, so no child blocks on a full pipe.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardvit.launch.local.processes import signal_name

MARK = "@doctor "  # prefix of our lines in a child's output
_ASK_SECONDS = 5.0
_POLL_SECONDS = 0.02
_FOLLOW_SECONDS = 5.0  # for the others to report after one has failed
_MOST_CHARACTERS = 300


@dataclass(frozen=True)
class Answer:
    """How a child process ended."""

    code: int | None  # -n: died of signal n; None: killed by us at the time limit
    output: str
    errors: str
    limit_seconds: float

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The JSON lines after `MARK`, without an incomplete last one."""
        lines = [line for line in self.output.splitlines(keepends=True) if line.startswith(MARK)]
        return [json.loads(line.removeprefix(MARK)) for line in lines if line.endswith("}\n")]

    @property
    def ending(self) -> str:
        """Describe the end, with the last line on standard error unless it only announces a part."""
        if self.code is None:
            return f"did not end within {self.limit_seconds:.0f} seconds and was killed"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        said = f": {lines[-1][:_MOST_CHARACTERS]}" if lines and not lines[-1].startswith(MARK) else ""
        if self.code < 0:
            return f"died of signal {-self.code} ({signal_name(-self.code)}){said}"
        return f"ended with exit code {self.code}{said}"


def ask(command: Sequence[str], *, limit_seconds: float = _ASK_SECONDS) -> Answer:
    """Run a small system command; code 127 if it is missing, as in a shell."""
    return run_children([command], environments=[os.environ], limit_seconds=limit_seconds)[0]


def run_children(
    commands: Sequence[Sequence[str]],
    *,
    environments: Sequence[Mapping[str, str]],
    limit_seconds: float,
    progress: Callable[[str], None] = lambda output: None,
) -> list[Answer]:
    """Run commands in parallel until all have ended; once one fails, the others get a few more seconds. `progress` is
    polled with the first one's output so far."""
    with tempfile.TemporaryDirectory(prefix="shardvit-doctor-") as folder:
        files = [
            (Path(folder, f"{number}.output"), Path(folder, f"{number}.errors")) for number in range(len(commands))
        ]
        children: list[subprocess.Popen[bytes] | None] = []
        try:
            for command, environment, paths in zip(commands, environments, files, strict=True):
                children.append(_start(command, environment=environment, paths=paths))
            _wait(children, limit_seconds=limit_seconds, meanwhile=lambda: progress(_read(files[0][0])))
            codes = [127 if child is None else child.poll() for child in children]
        finally:
            for child in filter(None, children):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # its own children too
                child.wait()
        return [
            Answer(code, _read(output), _read(errors), limit_seconds)
            for code, (output, errors) in zip(codes, files, strict=True)
        ]


def _start(
    command: Sequence[str], *, environment: Mapping[str, str], paths: tuple[Path, Path]
) -> subprocess.Popen[bytes] | None:
    with paths[0].open("wb") as output, paths[1].open("wb") as errors:
        try:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:  # missing or not executable
            errors.write(str(error).encode())
            return None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _wait(
    children: Sequence[subprocess.Popen[bytes] | None], *, limit_seconds: float, meanwhile: Callable[[], None]
) -> None:
    deadline = time.monotonic() + limit_seconds
    has_failed = False
    while time.monotonic() < deadline:
        codes = [1 if child is None else child.poll() for child in children]
        if None not in codes:
            return
        if any(codes) and not has_failed:
            has_failed, deadline = True, min(deadline, time.monotonic() + _FOLLOW_SECONDS)
        meanwhile()
        time.sleep(_POLL_SECONDS)
