"""Restart a failed stage as long as it makes progress. Pure.

One restart without a later saved step may be transient (a dead process's memory, an unreachable file server); two in a
row mean that the stage always fails at the same place.
"""

from dataclasses import dataclass

PAUSE_SECONDS = 5.0  # lets a transient cause pass, and the user press Ctrl-C
_FRUITLESS_RESTARTS = 1


@dataclass
class Restarts:
    """Restart counts of one `shardvit run`."""

    allowed: int  # over all stages
    used: int = 0
    _failed_before: tuple[str, int] | None = None
    _fruitless: int = 0

    def after_failure(self, stage: str, *, last_saved_step: int) -> str | None:
        """Count a restart and return None, or return why the stage is not restarted."""
        failed_before, self._failed_before = self._failed_before, (stage, last_saved_step)
        stuck = failed_before is not None and failed_before[0] == stage and last_saved_step <= failed_before[1]
        self._fruitless = self._fruitless + 1 if stuck else 0
        if self.used == self.allowed:
            return f"all {self.allowed} restarts are used up" if self.allowed else "--max-restarts is 0"
        if self._fruitless > _FRUITLESS_RESTARTS:
            return f"{self._fruitless} restarts in a row saved no later step, so another one would fail in the same way"
        self.used += 1
        return None
