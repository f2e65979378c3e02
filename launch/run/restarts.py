"""How often a stage that failed is started again by itself: as long as that may help.

A restart helps when the stage has saved a later step than at the failure before. One that did not may have met the
same passing trouble (memory that a dead process still held, a file server that was away); two in a row mean that the
stage fails at the same place whatever happens. No torch, no clock, no files.
"""

from __future__ import annotations

from dataclasses import dataclass

PAUSE_SECONDS = 5.0  # for what killed the stage to pass, and for a hand to reach Ctrl-C
_FRUITLESS_RESTARTS = 1


@dataclass
class Restarts:
    """The restarts of one `shardvit run`.

    Args:
        allowed: how many, over all stages.
    """

    allowed: int
    used: int = 0
    _failed_before: tuple[str, int] | None = None
    _fruitless: int = 0

    def after_failure(self, stage: str, *, last_saved_step: int) -> str | None:
        """Why there is no further restart; None: there is one, and it is counted.

        Args:
            stage: the stage that failed.
            last_saved_step: from which it would go on.
        """
        failed_before, self._failed_before = self._failed_before, (stage, last_saved_step)
        stuck = failed_before is not None and failed_before[0] == stage and last_saved_step <= failed_before[1]
        self._fruitless = self._fruitless + 1 if stuck else 0
        if self.used == self.allowed:
            return f"all {self.allowed} restarts are used up" if self.allowed else "--max-restarts is 0"
        if self._fruitless > _FRUITLESS_RESTARTS:
            return f"{self._fruitless} restarts in a row saved no later step, so another one would fail in the same way"
        self.used += 1
        return None
