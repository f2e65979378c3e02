"""Split a run's wall time by what it went into, from what the run recorded: events.jsonl and metrics.jsonl.

An attempt's steps count as useful up to the step at which the next attempt resumed, and as repeated after it. Times
within an attempt come from the curve's points (their speed leaves out evaluations and saves) and from the line "first
step after ..."; `perf/save_stall_frac` gives the stalls. Precise to a point of the curve where an attempt was killed
without a word: what it trained after its last point counts as waiting. Started as a part of `goodput` and `make soak`.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardvit.pipeline.runs.logs import Event, MetricRow
from shardvit.pipeline.runs.read import Run, RunStage

CATEGORIES = {
    "useful": "steps that the result contains",
    "repeated": "work after the step that was resumed from, done again",
    "evaluation": "",
    "saving": "training stood still for checkpoints",
    "start": "from a process's first instruction to its first step, without restoring",
    "restoring": "reading a checkpoint",
    "waiting": "noticing a failure, ending, the pause, the command's own start",
    "ending": "after the last step: the last save, the model, leaving",
}
_FIRST_STEP = re.compile(r"first step after ([\d.]+) s \(([\d.]+) s of CPU\): (.*)")
_PART = re.compile(r"(\S[^,]*?) ([\d.]+)(?:, |$)")
_REPEATED = re.compile(r"; repeats ([\d,]+) steps?$")
RESTORING = "restoring a checkpoint"
_SPEED = "perf/images_per_s"


@dataclass(frozen=True)
class WallTime:
    """Where the time of a run went."""

    seconds: Mapping[str, float]  # by CATEGORIES
    start: Mapping[str, float]  # parts of all starts, as the start clock names them
    attempts: int
    repeated_steps: int  # at least

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the time that trained the result."""
        return self.seconds["useful"] / max(1e-9, self.wall_seconds)

    def lines(self) -> list[str]:
        """A table."""
        wall = max(1e-9, self.wall_seconds)
        found = [f"goodput: {self.goodput:.1%} of {wall:.0f} s, in {self.attempts} attempts"]
        for name, words in CATEGORIES.items():
            seconds = self.seconds[name]
            found.append(f"  {seconds / wall:6.1%} {seconds:8.1f} s  {name}{f': {words}' if words else ''}")
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.start.items() if seconds >= 0.1)
        return [*found, f"  starts, s: {parts}"]


@dataclass(frozen=True)
class Attempt:
    """One attempt at a stage."""

    events: Sequence[Event]  # the first is its start
    rows: Sequence[MetricRow]  # up to `until`, as later ones are cut
    until: int  # the step that the next attempt resumed from, or the last
    repeated: int  # logged steps after it
    begin: float  # unix seconds: its first process started
    first: float  # its first step was done
    cpu_seconds: float  # of its start
    parts: Mapping[str, float]  # seconds of its start

    @property
    def curve(self) -> list[MetricRow]:
        return [row for row in self.rows if _SPEED in row.metrics]

    @property
    def end(self) -> Event | None:
        """None: killed."""
        return next((event for event in self.events if event.kind in ("stopped", "failed", "rollback", "done")), None)

    def stalled_seconds(self, row: MetricRow) -> float:
        """How long it had stood still for checkpoints."""
        return row.metrics.get("perf/save_stall_frac", 0.0) * max(0.0, row.time - self.events[0].time)

    def paced(self) -> list[tuple[int, float]]:
        """Steps and their seconds, without evaluation and saves, between points of the curve."""
        curve = self.curve
        return [
            (after.step - before.step, _seconds(after, steps=after.step - before.step))
            for before, after in pairwise(curve)
        ]


def spent(run: Run, *, started: float | None = None, ended: float | None = None) -> WallTime:
    """Split the time from `started` to `ended` (unix seconds; default: the first process's start and the last event).
    ValueError if nothing has trained."""
    found = [attempts(stage) for stage in run.stages]
    if not any(found):
        raise ValueError(f"{run.folder.path} has not trained")
    seconds, start = dict.fromkeys(CATEGORIES, 0.0), Counter[str]()
    now = started
    for stage in found:
        pace = [each for attempt in stage for each in attempt.paced()]
        general = sum(each for _, each in pace) / max(1, sum(steps for steps, _ in pace))
        for attempt, after in zip(stage, [*stage[1:], None], strict=True):
            seconds["waiting"] += 0.0 if now is None else max(0.0, attempt.begin - now)
            start.update(attempt.parts)
            own, now = _split(attempt, step_seconds=general, before=after.begin if after else math.inf)
            for name, each in own.items():
                seconds[name] += each
    if ended is not None and now is not None:
        seconds["ending"] += max(0.0, ended - now)
    return WallTime(
        seconds=seconds,
        start=start,
        attempts=sum(map(len, found)),
        repeated_steps=sum(attempt.repeated for stage in found for attempt in stage),
    )


def attempts(stage: RunStage) -> list[Attempt]:
    """A stage's attempts that are in its events, oldest first."""
    starts = [number for number, event in enumerate(stage.events) if event.kind == "start"]
    found: list[Attempt] = []
    for begin, after in zip(starts, [*starts[1:], None], strict=True):
        events = stage.events[begin:after]
        then = None if after is None else stage.events[after]
        ends = float("inf") if then is None else then.time
        rows = [row for row in stage.rows if events[0].time <= row.time < ends]
        repeated = _REPEATED.search(then.text) if then else None
        clock = next((event for event in events if _FIRST_STEP.search(event.text)), None)
        total, cpu, parts = 0.0, 0.0, dict[str, float]()
        if clock and (told := _FIRST_STEP.search(clock.text)):
            total, cpu = float(told[1]), float(told[2])
            parts = {name: float(each) for name, each in _PART.findall(told[3])}
        found.append(
            Attempt(
                events=events,
                rows=rows,
                until=then.step if then else max([events[0].step, *(row.step for row in rows)]),
                repeated=int(repeated[1].replace(",", "")) if repeated else 0,
                begin=clock.time - total if clock else events[0].time,
                first=clock.time if clock else events[0].time,
                cpu_seconds=cpu,
                parts=parts,
            )
        )
    return found


def _split(attempt: Attempt, *, step_seconds: float, before: float) -> tuple[dict[str, float], float]:
    """Seconds by category, and when the attempt ended, `before` a time. `step_seconds`: if it has no speed of its
    own."""
    pace, curve, begin = attempt.paced(), attempt.curve, attempt.events[0]
    if pace:
        step_seconds = sum(each for _, each in pace) / max(1, sum(steps for steps, _ in pace))
    step, time = (attempt.rows[-1].step, attempt.rows[-1].time) if attempt.rows else (begin.step, attempt.first)
    reached = max(attempt.first, time + max(0, attempt.until - step) * step_seconds)
    if attempt.end:
        reached = min(reached, attempt.end.time)
        end, tail = attempt.end.time, {"stopped": "saving", "done": "ending"}.get(attempt.end.kind, "repeated")
    else:
        end, tail = reached + attempt.repeated * step_seconds, "repeated"
        end = min(before, max([end, *(event.time for event in attempt.events)]))
        reached = min(reached, end)
    trained = reached - attempt.first
    stalled = min(trained, attempt.stalled_seconds(curve[-1]) if curve else 0.0)
    evaluated = min(trained - stalled, _evaluated(attempt, until=reached, step_seconds=step_seconds))
    restoring = attempt.parts.get(RESTORING, 0.0)
    seconds = {
        "start": attempt.first - attempt.begin - restoring,
        "restoring": restoring,
        "evaluation": evaluated,
        "saving": stalled,
        "useful": trained - stalled - evaluated,
    }
    seconds[tail] = seconds.get(tail, 0.0) + end - reached
    return seconds, end


def _evaluated(attempt: Attempt, *, until: float, step_seconds: float) -> float:
    """What windows of the curve with an evaluation took longer than their steps and stalls."""
    times = [event.time for event in attempt.events if event.kind == "evaluation" and event.time <= until]
    step, time, stall, seconds = attempt.events[0].step, attempt.first, 0.0, 0.0
    for number, row in enumerate(attempt.curve):
        steps, stalled = row.step - step, attempt.stalled_seconds(row)
        pace = steps * step_seconds if number == 0 else _seconds(row, steps=steps)
        if any(time < each <= row.time for each in times):
            seconds += max(0.0, row.time - time - pace - (stalled - stall))
        step, time, stall = row.step, row.time, stalled
    last = [event for event in attempt.events if event.kind == "evaluation" and time < event.time <= until]
    if last:
        seconds += max(0.0, last[-1].time - time - (last[-1].step - step) * step_seconds)
    return seconds


def _seconds(row: MetricRow, *, steps: int) -> float:
    return steps * row.images_seen / max(1, row.step) / max(1e-9, row.metrics[_SPEED])
