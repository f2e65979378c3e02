"""Dump stacks: on SIGUSR2 a rank appends all its threads' stacks to a file and continues.

faulthandler dumps in a C signal handler, so it works even while the main thread waits or holds the GIL in a C call.
The kernel prefers the main thread for it, but not in a process that was stopped: there another thread would read the
main thread's frames while they change, and crash.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import shardvit
from shardvit.data_shards.durable import break_links

DUMP_SIGNAL = signal.SIGUSR2
_INNERMOST_FRAMES, _OWN_FRAMES = 4, 6  # shown in a message
_OUTERMOST = (" in <module>", " in _run_module_as_main", "  ...")  # the last: faulthandler stops at 100 frames
_OURS = f"{Path(shardvit.__file__).parent}/"

# A main thread whose innermost Python frame is in one of these may be waiting for other ranks.
_WAITING_FILES = re.compile(
    r"torch/distributed/|deepspeed/comm/|pipeline/ranks/group\.py$|torch/autograd/(graph|__init__)\.py$|torch/_tensor\.py$"
)
_WAITING_FUNCTIONS = re.compile(r"wait|synchronize|barrier")  # DeepSpeed's, around collectives' handles


class StackDumps:
    """Appends this process's dumps to `path`, after `open` on SIGUSR2 and on request."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        """Install the handler, in the main thread; without a writable file, dumps go to stderr."""
        try:
            break_links(self._path)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:
            self._descriptor = os.dup(2)
        signal.signal(DUMP_SIGNAL, signal.SIG_IGN)  # restored by `close`, so that a late signal does not kill
        faulthandler.register(DUMP_SIGNAL, file=self._descriptor, all_threads=True)

    def dump(self) -> None:
        if self._descriptor is not None:
            faulthandler.dump_traceback(file=self._descriptor, all_threads=True)

    def close(self) -> None:
        """Ignore the signal from now on, and remove an empty file."""
        if self._descriptor is None:
            return
        faulthandler.unregister(DUMP_SIGNAL)
        size = os.fstat(self._descriptor).st_size
        os.close(self._descriptor)
        self._descriptor = None
        if not size:
            with suppress(OSError):
                self._path.unlink()


def stack_file(folder: Path, rank: int) -> Path:
    """Name a rank's dump file."""
    return folder / f"stack-rank-{rank}.txt"


def stack_excerpt(text: str, *, thread: int) -> list[str]:
    """Pick one thread's innermost lines and those in this project, innermost first."""
    lines = _lines_of(thread, text)
    own = [line for line in lines[_INNERMOST_FRAMES:] if _OURS in line]
    return lines[:_INNERMOST_FRAMES] + own[:_OWN_FRAMES]


def is_whole(text: str, *, main_thread: int) -> bool:
    """True once a dump, written in pieces, has reached the main thread's outermost frame, its end."""
    return bool((_lines_of(main_thread, text) or [""])[-1].endswith(_OUTERMOST))


def _lines_of(thread: int, text: str) -> list[str]:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("  "):
            inside = int((re.findall(r"0x([0-9a-f]+)", line) or ["0"])[0], 16) == thread
            lines = [] if inside else lines
        elif inside:
            lines.append(line)
    return lines


def main_thread_waits() -> bool:
    """True if the main thread waits for other ranks; call from another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    return bool(_WAITING_FILES.search(file) or ("/deepspeed/" in file and _WAITING_FUNCTIONS.search(function)))
