"""Render a run's page for the terminal: stages, speed, checkpoint, processes, two curves, events, log tail.

Works in 80 columns, without colours and in a pipe. A short terminal drops the log first, then events, then curves.
"""

import math
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardvit.data_shards.text import one_line, show_duration
from shardvit.launch.slurm.commands import Queued
from shardvit.launch.terminal_curves import Glyphs, bar, draw_curves
from shardvit.launch.watch.look import RankView, RunView, StageView
from shardvit.pipeline.runs.logs import Event

_STYLES = {"running": "green", "done": "blue", "stopped": "yellow", "interrupted": "yellow", "failed": "red"}
_KINDS = {"failed": "red", "spike": "yellow", "skipped": "yellow", "rollback": "yellow", "slow_rank": "yellow"}
_STUCK_SECONDS = 60.0  # without progress, before it is reported
_MOST_RANKS_NAMED = 4
_CHART_LINES = 9  # with its heading
_LEAST_CHART_LINES = 6
_BAR = 20


def page(run: RunView, *, width: int, height: int | None, glyphs: Glyphs, now: float | None = None) -> RenderableType:
    """Render the page; `height` None: unlimited; `now` in unix seconds, by default the clock's."""
    now = time.time() if now is None else now
    stamp = time.strftime("%H:%M:%S", time.localtime(now))
    parts: list[list[Text]] = [[_between(Text(one_line(str(run.path)), style="bold"), Text(stamp), width=width)]]
    parts.append(_stages(run.stages, width=width, glyphs=glyphs))
    stage = run.current
    if stage is not None:
        parts.append(_lines(_facts(stage), width=width, height=height))
        parts.append([_cut(line, width) for line in _rank_lines(() if stage.state == "done" else stage.ranks)])
    others = [each for each in run.stages if height is None and each is not stage and each.state != "done"]
    jobs = (Text(f"{each.name}: ").append_text(line) for each in others for line in _job(each))
    parts.append(_lines(jobs, width=width, height=height))
    parts.append([_cut(Text(one_line(note), style="yellow"), width) for note in run.notes[:4]])
    parts = [part for part in parts if part]
    left = 10_000 if height is None else height - sum(map(len, parts)) - len(parts)
    curves = _curves(stage, width=width, lines=min(_CHART_LINES, left), glyphs=glyphs) if stage is not None else []
    left -= len(curves) + bool(curves)
    events = _events(stage.on_disk.events if stage else (), width=width, lines=min(7 if height else 10, left), now=now)
    left -= len(events) + bool(events)
    log = _log(run, width=width, lines=min(12, left))
    parts += [part for part in (curves, events, log) if part]
    lines: list[Text] = []
    for part in parts:
        lines += [*([Text("")] if lines else []), *part]
    if glyphs == "ascii":
        for line in lines:
            line.plain = line.plain.replace("…", "~")  # of equal length, which keeps the styles' spans
    return Group(*lines)


def _stages(stages: Sequence[StageView], *, width: int, glyphs: Glyphs) -> list[Text]:
    from rich.console import Console

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=True, header_style="")
    for heading in ("stage", "state", "progress", "step", "ETA"):
        table.add_column(heading, justify="right" if heading in ("step", "ETA") else "left", no_wrap=True)
    for stage in stages:
        share = stage.step / stage.total_steps if stage.total_steps else float(stage.state == "done")
        percent = min(100.0 * share, 99.9) if share < 1 else 100.0
        progress = f"{bar(share, width=_BAR, glyphs=glyphs)} {percent:5.1f}%" if stage.total_steps else ""
        of = f" of {stage.total_steps:,}" if stage.total_steps else ""
        table.add_row(
            Text(stage.name),
            Text(stage.state, style=_STYLES.get(stage.state, "")),
            Text(progress),
            Text(f"{stage.step:,}{of}" if of or stage.step else ""),
            Text("" if math.isnan(stage.eta_seconds) else show_duration(stage.eta_seconds)),
        )
    console = Console(width=max(width, 20), color_system=None)
    drawn = console.render_lines(table, pad=False)
    lines = [Text.assemble(*((each.text, each.style or "") for each in line)) for line in drawn]
    for line in lines:
        line.rstrip()
    return lines


def _facts(stage: StageView) -> Iterator[Text]:
    values, on_disk = stage.on_disk.latest, stage.on_disk
    score = stage.score[0]
    said = (
        ("train/loss", "loss {:.4f}"),
        (score, score.partition("/")[2] + " {:.4f}"),
        ("val/balanced_accuracy", "balanced {:.4f}"),
        ("val/commonest_class_share", "commonest class {:.4f}"),
        ("perf/images_per_s", "{:,.1f} images/s"),
        ("perf/mfu", "MFU {:.1%}"),
        ("opt/lr", "lr {:.2e}"),
        ("perf/data_wait_frac", "data wait {:.1%}"),
    )
    facts = [form.format(values[name]) for name, form in said if name in values]
    if facts:
        yield Text(f"{stage.name}: {', '.join(facts)}")
    if "perf/step_seconds_p50" in values:
        hours = next((f"; {values[name]:,.2f} {name[5:].replace('_', '-')}" for name in _HOURS if name in values), "")
        usual, most, longest = (_short(values.get(f"perf/step_seconds_{which}")) for which in ("p50", "p95", "max"))
        yield Text(f"steps take {usual} (95 %: {most}, longest {longest}){hours}")
    yield from _job(stage)
    if (age := on_disk.checkpoint_age_seconds) is not None:
        restarts = f"; {on_disk.restarts} restart{'s' * (on_disk.restarts > 1)}" if on_disk.restarts else ""
        yield Text(f"last checkpoint: step {on_disk.record.last_saved_step:,}, {show_duration(age)} ago{restarts}")
    elif stage.state == "running":
        yield Text("no checkpoint yet", style="yellow")


_HOURS = ("perf/gpu_hours", "perf/process_hours")


def _job(stage: StageView) -> Iterator[Text]:
    queued = stage.queued or Queued("")
    if stage.job:
        where = f" on {one_line(queued.nodes)}" if queued.nodes and queued.state == "RUNNING" else ""
        why = f" ({one_line(queued.reason)})" if queued.reason else ""
        left = ""
        if queued.left_seconds is not None:
            left = f", {show_duration(queued.left_seconds)} until its time limit"
            if stage.requeues:
                left += f": {stage.requeues} requeue{'s' * (stage.requeues > 1)} left until the ETA"
        yield Text(f"SLURM job {one_line(stage.job)}: {one_line(queued.state) or 'not in the queue'}{why}{where}{left}")
    if stage.last_end and stage.state not in ("done", "running"):
        yield Text(f"its last end: {one_line(stage.last_end)}", style="yellow")


def _rank_lines(ranks: Sequence[RankView]) -> Iterator[Text]:
    if not ranks:
        return
    running = [rank for rank in ranks if rank.state == "runs"]
    if running:
        steps = sorted({rank.beat.step for rank in running})
        where = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
        statuses = Counter(one_line(rank.beat.status).removeprefix("the ") for rank in running).most_common(3)
        yield Text(
            f"{len(running)} of {len(ranks)} processes run, after {where}: {', '.join(what for what, _ in statuses)}"
        )
    else:
        states = Counter(rank.state for rank in ranks)
        words = {"left": "ended in good order", "dead": "dead", "silent": "silent", "failed": "failed"}
        yield Text(f"{len(ranks)} processes: {', '.join(f'{count} {words[state]}' for state, count in states.items())}")
    trouble = [rank for rank in ranks if _problem(rank)]
    for rank in trouble[:_MOST_RANKS_NAMED]:
        yield Text(f"  {one_line(rank.beat.name)}: {_problem(rank)}", style="red")
        if rank.beat.note:
            yield Text(f"    {one_line(rank.beat.note)}", style="red")
    if len(trouble) > _MOST_RANKS_NAMED:
        yield Text(f"  and {len(trouble) - _MOST_RANKS_NAMED} more", style="red")


def _problem(rank: RankView) -> str:
    match rank.state:
        case "dead":
            return f"is dead, after step {rank.beat.step:,}, in {one_line(rank.beat.status)}"
        case "silent":
            return f"no sign of life for {show_duration(rank.silent_seconds)}, after step {rank.beat.step:,}"
        case "failed":
            return f"failed after step {rank.beat.step:,}"
        case "runs" if rank.idle_seconds > _STUCK_SECONDS:
            return f"no progress for {show_duration(rank.idle_seconds)}, in {one_line(rank.beat.status)}"
        case _:
            return ""


def _curves(stage: StageView, *, width: int, lines: int, glyphs: Glyphs) -> list[Text]:
    loss = stage.on_disk.points("train/loss")
    if lines < _LEAST_CHART_LINES or not loss:
        return []
    shown = [("train/loss", loss), *([stage.score] if stage.score[0] else [])]
    if width < 60:
        shown = shown[:1]
    each = (width - 2 * (len(shown) - 1)) // len(shown)
    mark = "" if glyphs == "braille" else "*"
    columns: list[list[str]] = []
    for name, points in shown:
        steps, values = zip(*points, strict=True)
        curve = draw_curves([(steps, values)], width=each, height=lines - 1, marks=[mark])
        columns.append([f"{name} {values[-1]:.4f}", *curve])
    return [Text("  ".join(cell.ljust(each) for cell in row).rstrip()) for row in zip(*columns, strict=True)]


def _events(events: Sequence[Event], *, width: int, lines: int, now: float) -> list[Text]:
    if lines < 2 or not events:
        return []
    found = [Text("what happened", style="bold")]
    shown = [event for event in events[:-1] if event.kind != "checkpoint"]  # the last checkpoint is enough
    for event in [*shown, events[-1]][-(lines - 1) :]:
        line = Text(f"{_clock(event.time, now=now)}  {event.kind:<13} ", style=_KINDS.get(event.kind, ""))
        found.append(_cut(line.append(one_line(event.text)), width))
    return found


def _log(run: RunView, *, width: int, lines: int) -> list[Text]:
    if run.log_file is None or lines < 2:
        return []
    heading = Text(one_line(str(run.log_file)), style="bold")
    return [_cut(heading, width), *(_cut(Text(one_line(line)), width) for line in run.log[-(lines - 1) :])]


def _clock(at: float, *, now: float) -> str:
    try:
        when, today = time.localtime(at), time.localtime(now)
    except (OverflowError, ValueError, OSError):
        return "?".rjust(8)
    return time.strftime("%H:%M:%S" if when[:3] == today[:3] else "%m-%d %H:%M", when).rjust(8)


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{1000 * seconds:,.0f} ms" if seconds < 1 else show_duration(seconds)


def _lines(texts: Iterable[Text], *, width: int, height: int | None) -> list[Text]:
    """Cut each text to the width; wrap it if the height is unlimited."""
    if height is not None:
        return [_cut(text, width) for text in texts]
    return [Text(line, style=text.style) for text in texts for line in textwrap.wrap(text.plain, max(width, 20))]


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    text.no_wrap = True
    return text


def _between(left: Text, right: Text, *, width: int) -> Text:
    left.truncate(max(1, width - cell_len(right.plain) - 2), overflow="ellipsis")
    gap = max(1, width - cell_len(left.plain) - cell_len(right.plain))
    return left.append(" " * gap).append_text(right)
