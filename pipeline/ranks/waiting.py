"""Rank 0 works alone, and the others wait for it, however long that takes.

In a single collective they would run into its time-out. So they wait in exchanges of a second, which a thread of rank 0
answers: the end of the work is known at once, and so is the death of a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeline.ranks.group import Ranks

_TURN_SECONDS = 1.0


def while_others_wait(ranks: Ranks, work: Callable[[], None]) -> None:
    """Run `work` on rank 0; collective. What it raises is raised there alone. RuntimeError: a process has died."""
    if ranks.place.world_size == 1:
        return work()
    if not ranks.place.is_main:
        while not ranks.gather_objects(False)[0]:
            pass  # one more turn
        return None
    is_over = threading.Event()
    trouble: list[RuntimeError] = []

    def answer() -> None:
        try:
            while not ranks.gather_objects(is_over.wait(_TURN_SECONDS))[0]:
                pass
        except RuntimeError as error:  # of gloo, if a process has died
            trouble.append(error)

    thread = threading.Thread(target=answer, daemon=True, name="others-wait")
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    if trouble:
        raise trouble[0]
