"""Draw a run's timeline: attempts at stages as bars, checkpoints, evaluations and trouble as ticks, over time.

Per cent of the width keep text readable on a phone. Pauses above a tenth of the working time are cut to it, and marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardvit.data_shards.text import counted, show_duration
from shardvit.launch.pages.blocks import PageDrawing, PageTable
from shardvit.launch.pages.curves import plausible, text
from shardvit.launch.pages.facts import duration_cell, in_per_cent
from shardvit.pipeline.runs.logs import Event, EventKind
from shardvit.pipeline.runs.read import Run, RunStage

_LANES: dict[EventKind, str] = {
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "stopped": "stopped by a signal",
    "failed": "failures",
    "rollback": "rollbacks",
    "skipped": "skipped steps",
    "spike": "spikes of the loss",
    "damaged_image": "damaged images",
    "slow_rank": "slow ranks",
}
_ROUTINE = ("checkpoint", "evaluation")
_LEGEND = (  # (class of the mark, label)
    ("bar", "an attempt at a stage"),
    ("bar soft", "the attempt after it"),
    ("tick", "a checkpoint or evaluation"),
    ("tick bad", "an interruption or trouble"),
    ("mark", "a pause that is cut short"),
)
_LANE_HEIGHT, _BAR_HEIGHT, _AXIS_HEIGHT = 34, 18, 22
_LONGEST_PAUSE = 0.1  # of the working time
_SHORT_PAUSE_SECONDS = 60.0  # shorter pauses are never cut
_MOST_TICKS = 400  # in a lane
_MOST_LISTED = 300

Spans = Sequence[tuple[float, float]]  # (start, end) in unix seconds


@dataclass(frozen=True)
class Clock:
    """Map unix times to the axis, with long pauses cut: linear between `times`, at `elapsed` seconds."""

    times: list[float]
    elapsed: list[float]
    cuts: Spans

    @classmethod
    def of(cls, attempts: Spans) -> Clock:
        begun, pauses = min(attempts)[0], list[tuple[float, float]]()
        until = begun
        for start, end in sorted(attempts):
            if start > until:
                pauses.append((until, start))
            until = max(until, end)
        work = until - begun - sum(to - start for start, to in pauses)
        longest = max(_SHORT_PAUSE_SECONDS, _LONGEST_PAUSE * work)
        cuts = [(start, to) for start, to in pauses if to - start > longest]
        times = [begun, *(time for cut in cuts for time in cut), until]
        lengths = np.diff(times)
        lengths[1::2] = longest
        return cls(times, [0.0, *np.cumsum(lengths).tolist()], cuts)

    def percent(self, time: float) -> float:
        return float(np.interp(time, self.times, self.elapsed)) * 100 / (self.elapsed[-1] or 1.0)


def time_line(history: Run, *, title: str = "") -> PageDrawing | None:
    """Draw the timeline of a run; None if it has not started."""
    spans = {stage.name: found for stage in history.stages if (found := _attempts(stage))}
    everything = [span for attempts in spans.values() for span in attempts]
    if not everything or max(end for _, end in everything) <= min(everything)[0]:
        return None
    clock = Clock.of(everything)
    lanes: dict[EventKind, list[Event]] = {kind: events for kind in _LANES if (events := _events(history, kind))}
    parts: list[str] = []
    top = 0
    for name, attempts in spans.items():
        for number, (start, end) in enumerate(attempts, start=1):
            x, width = clock.percent(start), max(0.3, clock.percent(end) - clock.percent(start))
            place = f'x="{x:.2f}%" y="{top + 16}" width="{width:.2f}%" height="{_BAR_HEIGHT}"'
            said = text(f"{name}, attempt {number}: {show_duration(end - start)}")
            parts.append(f'<rect class="bar{"" if number % 2 else " soft"}" {place}><title>{said}</title></rect>')
        x, right = clock.percent(attempts[0][0]), clock.percent(attempts[-1][1])
        place = f'x="{x:.2f}%"' if x < 55 else f'x="{right:.2f}%" text-anchor="end"'
        parts.append(f'<text class="label" {place} y="{top + 11}">{text(name)}, {_work(attempts)}</text>')
        top += _LANE_HEIGHT + 8
    for kind, events in lanes.items():
        parts.append(f'<text x="0" y="{top + 11}">{_LANES[kind]}: {len(events):,}</text>')
        for event in events[:: max(1, -(-len(events) // _MOST_TICKS))]:
            line = _upright("tick" if kind in _ROUTINE else "tick bad", clock.percent(event.time), top + 17, top + 28)
            parts.append(f"{line}<title>{text(f'step {event.step:,}: {in_per_cent(event.text)}'[:300])}</title></line>")
        top += _LANE_HEIGHT
    for cut in clock.cuts:
        parts.append(_upright("mark", sum(map(clock.percent, cut)) / 2, 0, top) + "</line>")
    parts.append(f'<line class="axis" x1="0" x2="100%" y1="{top}" y2="{top}"/>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        place, elapsed = f'x="{100 * share:g}%" y="{top + 15}"', show_duration(share * clock.elapsed[-1])
        parts.append(f'<text {place} text-anchor="{anchor}">{elapsed}</text>')
    alt = text("; ".join(_words(spans, lanes)))
    size = f'width="100%" height="{top + _AXIS_HEIGHT}"'
    svg = f'<svg class="time" {size} role="img" aria-label="{alt}">{"".join(parts)}</svg>'
    cut = [f"a pause of {show_duration(to - start)} is shortened" for start, to in clock.cuts[:5]]
    begun = np.datetime64(int(clock.times[0]), "s").astype(str).replace("T", " ")
    caption = f"{'; '.join([f'Begun {begun} UTC', *cut])}. What happened is named under the pointer."
    return PageDrawing(title, caption, svg, tuple(each for each in _LEGEND if f'class="{each[0]}"' in svg))


def event_table(history: Run) -> PageTable | None:
    """Tabulate notable events, oldest first; None if there are none."""
    found = [(event.time, stage.name, event) for stage in history.stages for event in stage.events]
    found = sorted((each for each in found if each[2].kind not in _ROUTINE), key=lambda each: each[0])
    if not found:
        return None
    kept, begun = found[-_MOST_LISTED:], found[0][0]
    rows = [
        (duration_cell(time - begun), stage, event.step, event.kind.replace("_", " "), in_per_cent(event.text))
        for time, stage, event in kept
    ]
    more = f"The {len(found) - len(kept):,} before these are in events.jsonl." if len(found) > len(kept) else ""
    title = f"What happened: {counted(len(found), 'event')}"
    return PageTable(("after", "stage", "step", "what", "said"), rows, title=title, caption=more, folded=True)


def _events(history: Run, kind: EventKind) -> list[Event]:
    return [event for stage in history.stages for event in stage.events if event.kind == kind]


def _attempts(stage: RunStage) -> list[tuple[float, float]]:
    """Start and end of each attempt, from its events or else its rows."""
    times = plausible([*stage.times, *(event.time for event in stage.events)])
    if not len(times):
        return []
    starts = plausible(event.time for event in stage.events if event.kind == "start").tolist()
    if not any(event.kind == "start" for event in stage.events):
        # The first row follows the first steps; the record's seconds include them.
        starts = [float(min(times[0], times[-1] - stage.record.seconds))]
    starts = starts or [float(times[0])]
    before = np.searchsorted(times, [*starts[1:], np.inf])  # times before the next attempt
    return [
        (start, max(start, float(times[max(0, count - 1)])))
        for start, count in zip(starts, before.tolist(), strict=True)
    ]


def _upright(kind: str, percent: float, top: int, bottom: int) -> str:
    return f'<line class="{kind}" x1="{percent:.2f}%" x2="{percent:.2f}%" y1="{top}" y2="{bottom}">'


def _work(attempts: Spans) -> str:
    return show_duration(sum(end - start for start, end in attempts))


def _words(spans: Mapping[str, Spans], lanes: Mapping[EventKind, Sequence[Event]]) -> Iterable[str]:
    for name, attempts in spans.items():
        yield f"{name} in {counted(len(attempts), 'attempt')}, {_work(attempts)}"
    for kind, events in lanes.items():
        yield f"{_LANES[kind]}: {len(events):,}"
