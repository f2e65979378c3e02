"""Torch's threads on CPUs: no more than the machine gives cores, and how long they wait for one.

A thread that waits for a core holds up all the others at every product: fewer of them may be faster (OMP_NUM_THREADS).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

WORTH_A_WORD = 0.25  # of the time that threads could have run; an idle machine's is below 0.05


def settle_threads(*, cores: float, asked: int | None) -> str:
    """Give torch `asked` threads (OMP_NUM_THREADS), else its own number within this process's `cores`. Returns a
    sentence if they are more than the cores."""
    import torch

    torch.set_num_threads(asked or max(1, min(torch.get_num_threads(), int(cores))))
    if torch.get_num_threads() <= max(1.0, cores):
        return ""
    return (
        f"OMP_NUM_THREADS is {asked}, but each process has only {cores:.3g} cores here, so that its threads wait for "
        f"one another: set OMP_NUM_THREADS={max(1, int(cores))}, or unset it"
    )


class CoreWaits:
    """How long this process's threads wait for a core, by Linux's scheduler; 0 where it does not say."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._ran, self._waited = self._read()

    def share(self) -> float:
        """The share of the threads' runnable time since the last call that they spent waiting for a core."""
        ran, waited = self._ran, self._waited
        self._ran, self._waited = self._read()
        ran, waited = max(0, self._ran - ran), max(0, self._waited - waited)  # less: threads have ended
        return waited / (ran + waited) if waited else 0.0

    def _read(self) -> tuple[int, int]:
        """Nanoseconds that its threads ran and waited."""
        ran = waited = 0
        for file in self._tasks.glob("*/schedstat"):
            with suppress(OSError, ValueError):  # it ended meanwhile
                own_ran, own_waited, _ = map(int, file.read_text().split())
                ran, waited = ran + own_ran, waited + own_waited
        return ran, waited
