"""Put the exit codes of a stage's processes into words.

Launchers report signal n as -n, 256 - n or 128 + n. The kernel's count of out-of-memory kills (of this cgroup if there
is one) tells why a process got SIGKILL: three small reads.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from pipeline.recipe.vocabulary import EXIT_STOPPED, EXIT_USER_ERROR

_HINTS: dict[int, str] = {
    signal.SIGBUS: ", as happens when /dev/shm is too small or a disk filled up under an open file",
    signal.SIGSEGV: ", a crash inside a library",
    signal.SIGABRT: ", a library gave up: its message is above",
}


def signal_of(code: int) -> int:
    """The signal that an exit code stands for; 0: none."""
    return -code if code < 0 else 256 - code if code > 192 else code - 128 if code > 128 else 0


def overall_code(codes: Sequence[int], *, stop_was_asked: bool) -> int:
    """One exit code for several processes, given in the order of ending; a user's mistake or a requested stop wins."""
    for telling in (EXIT_USER_ERROR, *((EXIT_STOPPED,) if stop_was_asked else ())):
        if telling in codes:
            return telling
    return next((code for code in codes if code), 0)


def reason(code: int, *, out_of_memory: bool | None) -> str:
    """Say why a stage is not done; `out_of_memory`: the kernel killed a process for that (None: unknown)."""
    number = signal_of(code)
    if code == EXIT_STOPPED:
        return "stopped and saved"
    if code == 0:  # deepspeed's, even if its process that watches the ranks failed
        return "its launcher was killed"
    if number == signal.SIGKILL:
        if out_of_memory:
            return "the kernel killed a process because memory ran out"
        hint = ", which is what the kernel does when memory runs out" if out_of_memory is None else ""
        return f"a process was killed by signal 9{hint}"
    if number:
        return f"a process was ended by signal {number} ({signal_name(number)}){_HINTS.get(number, '')}"
    return f"exit code {code}"


def memory_kills(root: Path = Path("/")) -> int | None:
    """The kernel's out-of-memory kills so far, in this cgroup or else this machine; None: unknown."""
    try:
        groups = dict(line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines())
    except (OSError, ValueError):
        groups = {}
    counts = [root / "proc/vmstat"]
    if "" in groups:
        counts.insert(0, root / "sys/fs/cgroup" / groups[""].strip("/") / "memory.events")
    if "memory" in groups:
        counts.insert(0, root / "sys/fs/cgroup/memory" / groups["memory"].strip("/") / "memory.oom_control")
    for path in counts:
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def signal_name(number: int) -> str:
    """Name a signal, such as SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "without a name"
