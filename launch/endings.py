"""How the processes of a stage ended, in words.

A launcher passes a rank's exit code on: of a signal it is -n, 256 - n or 128 + n. Whether a SIGKILL came for want of
memory is told by the kernel's own count of such kills, of this cgroup where there is one. Costs three small reads.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from pipeline.vocabulary import EXIT_STOPPED, EXIT_USER_ERROR

_HINTS: dict[int, str] = {
    signal.SIGBUS: ", as happens when /dev/shm is too small or a disk filled up under an open file",
    signal.SIGSEGV: ", a crash inside a library",
    signal.SIGABRT: ", a library gave up: its message is above",
}


def signal_of(code: int) -> int:
    """The number of the signal that an exit code stands for; 0: of none."""
    return -code if code < 0 else 256 - code if code > 192 else code - 128 if code > 128 else 0


def overall_code(codes: Sequence[int], *, stop_was_asked: bool) -> int:
    """One exit code for several processes or hosts, whose codes come in the order in which they ended.

    A mistake, which the others could not know of, and "stopped", where that was asked for, tell more than the rest.
    """
    for telling in (EXIT_USER_ERROR, *((EXIT_STOPPED,) if stop_was_asked else ())):
        if telling in codes:
            return telling
    return next((code for code in codes if code), 0)


def reason(code: int, *, out_of_memory: bool | None) -> str:
    """Why a stage is not done.

    Args:
        code: the launcher's exit code; negative: it was itself ended by a signal.
        out_of_memory: whether the kernel killed a process meanwhile for want of memory; None: it does not say.
    """
    number = signal_of(code)
    if code == EXIT_STOPPED:
        return "stopped and saved"
    if code == 0:  # deepspeed's, whatever became of the process that watches the ranks
        return "its launcher was killed"
    if number == signal.SIGKILL:
        if out_of_memory:
            return "the kernel killed a process because memory ran out"
        hint = ", which is what the kernel does when memory runs out" if out_of_memory is None else ""
        return f"a process was killed by signal 9{hint}"
    if number:
        return f"a process was ended by signal {number} ({_signal_name(number)}){_HINTS.get(number, '')}"
    return f"exit code {code}"


def memory_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel has killed for want of memory so far, in this cgroup or else on this machine."""
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "without a name"
