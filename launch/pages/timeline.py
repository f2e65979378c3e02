"""Draw the timeline: stages and attempts as bars; checkpoints, evaluations and trouble as ticks; over the clock.

Drawn in per cent of the width, so that its words keep their size on a phone. A pause between two attempts longer than
a tenth of the work is cut to a tenth, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_shards.text import show_duration
from launch.pages.blocks import PageDrawing, PageTable
from launch.pages.curves import LATEST, text
from launch.pages.facts import duration_cell, in_per_cent
from pipeline.runs.logs import EventKind
from pipeline.runs.read import Run, RunStage

_LANES: tuple[tuple[EventKind, str], ...] = (
    ("checkpoint", "checkpoints"),
    ("evaluation", "evaluations"),
    ("stopped", "stopped by a signal"),
    ("failed", "failures"),
    ("rollback", "rollbacks"),
    ("skipped", "skipped steps"),
    ("spike", "spikes of the loss"),
    ("damaged_image", "damaged images"),
    ("slow_rank", "slow ranks"),
)
_ROUTINE = ("checkpoint", "evaluation")
_LEGEND = (  # (class of the mark, label)
    ("bar", "an attempt at a stage"),
    ("bar soft", "the attempt after it"),
    ("tick", "a checkpoint or evaluation"),
    ("tick bad", "an interruption or trouble"),
    ("mark", "a pause that is cut short"),
)
_LANE_HEIGHT, _BAR_HEIGHT, _AXIS_HEIGHT = 34, 18, 22
_LONGEST_PAUSE = 0.1  # of the work
_SHORT_PAUSE_SECONDS = 60.0  # is never cut
_MOST_TICKS = 400  # of a lane
_MOST_LISTED = 300


@dataclass(frozen=True)
class Clock:
    """Unix times to per cent of the width, with long pauses cut."""

    begun: float
    ended: float
    cuts: tuple[tuple[float, float, float], ...]  # (from, to, seconds that are shown of it)

    @property
    def shown_seconds(self) -> float:
        return self.elapsed(self.ended)

    def elapsed(self, time: float) -> float:
        """Seconds on the axis."""
        time = min(max(time, self.begun), self.ended)
        cut = sum((min(time, to) - start) * (1 - kept / (to - start)) for start, to, kept in self.cuts if time > start)
        return time - self.begun - cut

    def percent(self, time: float) -> float:
        return 100 * self.elapsed(time) / self.shown_seconds if self.shown_seconds > 0 else 0.0


def time_line(history: Run, *, title: str = "") -> PageDrawing | None:
    """The time line of a run; None: it has not begun."""
    spans = {stage.name: _attempts(stage) for stage in history.stages}
    times = [time for attempts in spans.values() for attempt in attempts for time in attempt]
    if not times or max(times) <= min(times):
        return None
    clock = _clock([attempt for attempts in spans.values() for attempt in attempts])
    parts: list[str] = []
    top = 0
    for stage in history.stages:
        for number, (start, end) in enumerate(spans[stage.name], start=1):
            x, width = clock.percent(start), max(0.3, clock.percent(end) - clock.percent(start))
            soft = "" if number % 2 else " soft"
            said = text(f"{stage.name}, attempt {number}: {show_duration(end - start)}")
            parts.append(
                f'<rect class="bar{soft}" x="{x:.2f}%" y="{top + 16}" width="{width:.2f}%" height="{_BAR_HEIGHT}">'
                f"<title>{said}</title></rect>"
            )
        if spans[stage.name]:
            begun, ended = spans[stage.name][0][0], spans[stage.name][-1][1]
            took = show_duration(sum(end - start for start, end in spans[stage.name]))
            x, right = clock.percent(begun), clock.percent(ended)
            place = f'x="{x:.2f}%"' if x < 55 else f'x="{right:.2f}%" text-anchor="end"'
            parts.append(f'<text class="label" {place} y="{top + 11}">{text(stage.name)}, {took}</text>')
            top += _LANE_HEIGHT + 8
    for kind, name in _LANES:
        events = [event for stage in history.stages for event in stage.events if event.kind == kind]
        if not events:
            continue
        parts.append(f'<text x="0" y="{top + 11}">{text(name)}: {len(events):,}</text>')
        bad = "" if kind in _ROUTINE else " bad"
        for event in events[:: max(1, -(-len(events) // _MOST_TICKS))]:
            x = clock.percent(event.time)
            line = f'<line class="tick{bad}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top + 17}" y2="{top + 28}">'
            parts.append(f"{line}<title>{text(f'step {event.step:,}: {in_per_cent(event.text)}'[:300])}</title></line>")
        top += _LANE_HEIGHT
    for start, _, kept in clock.cuts:
        x = clock.percent(start + 1e-6) + 50 * kept / clock.shown_seconds
        parts.append(f'<line class="mark" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{top}"/>')
    parts += _axis(clock, top=top)
    height = top + _AXIS_HEIGHT
    alt = _alt(history, spans)
    svg = f'<svg class="time" width="100%" height="{height}" role="img" aria-label="{text(alt)}">{"".join(parts)}</svg>'
    cut = "; ".join(f"a pause of {show_duration(to - start)} is shortened" for start, to, _ in clock.cuts[:5])
    begun = np.datetime64(int(clock.begun), "s").astype(str).replace("T", " ")
    caption = f"Begun {begun} UTC{f'; {cut}' if cut else ''}. What happened is named under the pointer."
    return PageDrawing(title, caption, svg, tuple(each for each in _LEGEND if f'class="{each[0]}"' in svg))


def event_table(history: Run) -> PageTable | None:
    """Notable events, oldest first; None if there are none."""
    found = [(stage.name, event) for stage in history.stages for event in stage.events if event.kind not in _ROUTINE]
    if not found:
        return None
    found.sort(key=lambda each: each[1].time)
    kept = found[-_MOST_LISTED:]
    begun = found[0][1].time
    rows = [
        (duration_cell(event.time - begun), stage, event.step, event.kind.replace("_", " "), in_per_cent(event.text))
        for stage, event in kept
    ]
    more = f"The {len(found) - len(kept):,} before these are in events.jsonl." if len(found) > len(kept) else ""
    title = f"What happened: {len(found):,} events" if len(found) > 1 else "What happened: 1 event"
    return PageTable(("after", "stage", "step", "what", "said"), rows, title=title, caption=more, folded=True)


def _attempts(stage: RunStage) -> list[tuple[float, float]]:
    """When each attempt began and ended (unix seconds), from its events, or else from its rows."""
    times = np.concatenate([stage.times, [event.time for event in stage.events]])
    times = np.sort(times[(times > 0) & (times < LATEST)])
    if not len(times):
        return []
    starts = sorted(event.time for event in stage.events if event.kind == "start" and 0 < event.time < LATEST)
    starts = starts or [float(times[0])]
    if not any(event.kind == "start" for event in stage.events):
        # The first row comes after the first steps, which the record's time knows of.
        starts = [min(starts[0], float(times[-1]) - stage.record.seconds)]
    found: list[tuple[float, float]] = []
    for number, start in enumerate(starts):
        after = starts[number + 1] if number + 1 < len(starts) else float("inf")
        within = times[(times >= start) & (times < after)]
        found.append((start, float(within[-1]) if len(within) else start))
    return found


def _clock(attempts: Sequence[tuple[float, float]]) -> Clock:
    ordered = sorted(attempts)
    begun, ended = ordered[0][0], max(end for _, end in ordered)
    pauses: list[tuple[float, float]] = []
    until = begun
    for start, end in ordered:
        if start > until:
            pauses.append((until, start))
        until = max(until, end)
    busy = (ended - begun) - sum(to - start for start, to in pauses)
    longest = max(_SHORT_PAUSE_SECONDS, _LONGEST_PAUSE * busy)
    return Clock(begun, ended, tuple((start, to, longest) for start, to in pauses if to - start > longest))


def _axis(clock: Clock, *, top: int) -> list[str]:
    parts = [f'<line class="axis" x1="0" x2="100%" y1="{top}" y2="{top}"/>']
    labels = ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    for share, anchor in labels:
        elapsed = share * clock.shown_seconds
        parts.append(
            f'<text x="{100 * share:g}%" y="{top + 15}" text-anchor="{anchor}">{show_duration(elapsed)}</text>'
        )
    return parts


def _alt(history: Run, spans: dict[str, list[tuple[float, float]]]) -> str:
    parts = [
        f"{name} in {len(attempts)} attempt{'s' if len(attempts) > 1 else ''}, "
        f"{show_duration(sum(end - start for start, end in attempts))}"
        for name, attempts in spans.items()
        if attempts
    ]
    counts = {
        name: sum(event.kind == kind for stage in history.stages for event in stage.events) for kind, name in _LANES
    }
    return "; ".join([*parts, *(f"{name}: {count:,}" for name, count in counts.items() if count)])
