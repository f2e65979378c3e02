"""Other programs, asked so that none of them can take the doctor along: a crash, a hang or a missing command is an
answer like any other.

Children run in sessions of their own, and whatever is left of one is killed with it. Their output goes through files,
so none of them waits for a reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

MARK = "@doctor "  # begins the lines of a child's output that are ours; libraries print what they like
_ASK_SECONDS = 5.0
_LOOK_SECONDS = 0.02
_FOLLOW_SECONDS = 5.0  # after one of several has failed, the others may still say why they did
_MOST_CHARACTERS = 300


@dataclass(frozen=True)
class Answer:
    """What became of a child.

    Attributes:
        code: its exit code, -n of a signal; None: it did not end in time and was killed.
        output: its standard output.
        errors: its standard error.
    """

    code: int | None
    output: str
    errors: str
    limit_seconds: float

    @property
    def is_success(self) -> bool:
        return self.code == 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What it said with `say`."""
        lines = [line for line in self.output.splitlines() if line.startswith(MARK) and line.endswith("}")]
        return [json.loads(line.removeprefix(MARK)) for line in lines]

    @property
    def ending(self) -> str:
        """How it ended, in words, with the last line that it wrote to standard error, since its last `begin`."""
        if self.code is None:
            return f"did not end within {self.limit_seconds:.0f} seconds and was killed"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        said = f": {lines[-1][:_MOST_CHARACTERS]}" if lines and not lines[-1].startswith(MARK) else ""
        if self.code < 0:
            return f"died of signal {-self.code} ({_signal_name(-self.code)}){said}"
        return f"ended with exit code {self.code}{said}"


def say(**facts: object) -> None:
    """One line for the doctor, written by a child."""
    print(MARK + json.dumps(facts), flush=True)


def begin(part: str) -> None:
    """What is written to standard error from here on belongs to this part."""
    say(begin=part)
    print(f"{MARK}{part}", file=sys.stderr, flush=True)


def ask(command: Sequence[str], *, limit_seconds: float = _ASK_SECONDS) -> Answer:
    """Run a small command of the system; one that is not there ends with code 127, as in a shell."""
    return run_children([command], environments=[os.environ], limit_seconds=limit_seconds)[0]


def run_children(
    commands: Sequence[Sequence[str]], *, environments: Sequence[Mapping[str, str]], limit_seconds: float
) -> list[Answer]:
    """Run commands beside one another until all have ended; once one fails, the others have a few seconds left."""
    with contextlib.ExitStack() as stack:
        files = [(stack.enter_context(_file()), stack.enter_context(_file())) for _ in commands]
        children: list[subprocess.Popen[bytes] | None] = []
        try:
            for command, environment, (output, errors) in zip(commands, environments, files, strict=True):
                children.append(_start(command, environment=environment, output=output, errors=errors))
            _wait(children, limit_seconds=limit_seconds)
            codes = [127 if child is None else child.poll() for child in children]
        finally:
            for child in children:
                if child is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(child.pid, signal.SIGKILL)  # and what it has started itself
                    child.wait()
        return [
            Answer(code, _content(output), _content(errors), limit_seconds)
            for code, (output, errors) in zip(codes, files, strict=True)
        ]


def _start(
    command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
    except OSError as error:  # not there, or not to be executed
        errors.write(str(error).encode())
        return None


def _wait(children: Sequence[subprocess.Popen[bytes] | None], *, limit_seconds: float) -> None:
    deadline = time.monotonic() + limit_seconds
    has_failed = False
    while time.monotonic() < deadline:
        codes = [1 if child is None else child.poll() for child in children]
        if None not in codes:
            return
        if any(codes) and not has_failed:
            has_failed = True
            deadline = min(deadline, time.monotonic() + _FOLLOW_SECONDS)
        time.sleep(_LOOK_SECONDS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "without a name"


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
