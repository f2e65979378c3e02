"""`shardvit watch` and `shardvit status`. Imports are lazy to keep --help fast."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.launch.flags import switch
from shardvit.pipeline.recipe.vocabulary import SWEEP_FILE

if TYPE_CHECKING:
    from rich.console import Console

    from shardvit.launch.terminal_curves import Glyphs
    from shardvit.launch.watch.look import Watcher
    from shardvit.launch.watch.packing import PackingWatcher

_LEAST_SECONDS = 0.2
_SLICE_SECONDS = 0.5
_STDIN = 0


def watch(
    run: Path,
    /,
    *,
    once: Annotated[bool, switch("Print the page once, and end; also into a pipe.")] = False,
    as_json: Annotated[bool, switch("Print it once, as JSON.", "--json")] = False,
    interval: Annotated[float, Parameter(help="Seconds between two looks.")] = 2.0,
) -> int:
    """Follow a run in the terminal: stages, speed, ETA, checkpoints, jobs, curves, log.

    RUN is its folder, RUNS/NAME; it may run here, on other hosts or in SLURM.
    Reads only the folder's files and SLURM's queue. Ends when the run is done
    or deleted, or when you press q (or Ctrl-C), which leaves the run alone.
    For a sweep, RUNS/NAME-sweep, prints its table. For a packing, OUT, says how
    many shards are made, by whatever makes them.

    Some examples:
        shardvit watch runs/digits
        shardvit watch runs/digits --once
    """
    if not interval >= _LEAST_SECONDS:
        raise UserError(f"--interval {interval:g}: give {_LEAST_SECONDS:g} seconds or more")
    if (run / SWEEP_FILE).is_file():
        from shardvit.launch.sweep.record import show_progress

        print(show_progress(run, form="json" if as_json else "text"))
        return 0

    from shardvit.launch.slurm.commands import Slurm
    from shardvit.launch.watch.look import Watcher
    from shardvit.launch.watch.packing import PackingWatcher

    packing = PackingWatcher(run, slurm=Slurm())
    if packing.is_one:
        once = once or as_json or not sys.stdout.isatty()
        return _watch_packing(packing, as_json=as_json, every_seconds=None if once else interval)
    watcher = Watcher(run, slurm=Slurm())
    if as_json:
        view = watcher.look(queue="wait for it")
        tree = {"run": str(view.path), "stages": [each.as_tree() for each in view.stages], "notes": view.notes}
        print(json.dumps(tree, indent=1))
        return 0
    console = open_console()
    try:
        if once or not console.is_terminal:
            show_once(watcher, console=console)
        else:
            follow(watcher, console=console, interval_seconds=interval)
    except KeyboardInterrupt:
        pass  # the run continues
    return 0


def _watch_packing(packing: PackingWatcher, *, as_json: bool, every_seconds: float | None) -> int:
    from rich.live import Live

    from shardvit.launch.watch.packing import as_text

    seen = packing.look()
    if every_seconds is None:
        print(json.dumps(seen, indent=1) if as_json else as_text(seen))
        return 0
    with suppress(KeyboardInterrupt), Live(as_text(seen), console=open_console(), auto_refresh=False) as live:
        while seen["state"] != "packed":
            _wait(every_seconds)
            live.update(as_text(seen := packing.look()), refresh=True)
    return 0


def status(
    run: Path,
    /,
    *,
    as_json: Annotated[bool, switch("Print it as JSON.", "--json")] = False,
) -> int:
    """Print the progress of a run or a sweep, as `shardvit watch RUN --once`.

    Some examples:
        shardvit status runs/digits
        shardvit status runs/digits --json
    """
    return watch(run, once=True, as_json=as_json)


def open_console() -> Console:
    """Open a console on standard output, without escape sequences if it is no terminal."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout,
        force_terminal=is_terminal,
        color_system="auto" if is_terminal else None,
        markup=False,
        emoji=False,
        highlight=False,
    )


def show_once(watcher: Watcher, *, console: Console) -> None:
    """Print the page at full length."""
    from shardvit.launch.watch.screen import page

    view = watcher.look(queue="wait for it")
    console.print(page(view, width=console.width, height=None, glyphs=_glyphs(console)))


def follow(watcher: Watcher, *, console: Console, interval_seconds: float) -> None:
    """Redraw the page until the run is done; leave the last one on the screen."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from shardvit.launch.watch.screen import page

    try:
        with _leaving_by_q() as keyboard, Live(console=console, auto_refresh=False, screen=True) as live:
            key = "Ctrl-C" if keyboard is None else "q"
            footer = Text(f"{key} leaves, the run continues", style="dim", no_wrap=True)
            while True:
                view = watcher.look()
                size = console.size
                shown = page(view, width=size.width, height=size.height - 3, glyphs=_glyphs(console))
                live.update(Group(shown, "", footer), refresh=True)
                if view.is_done or _wait(interval_seconds, keyboard=keyboard) == "left":
                    break
    finally:
        show_once(watcher, console=console)


def _glyphs(console: Console) -> Glyphs:
    return "braille" if console.encoding.startswith("utf") else "ascii"


@contextmanager
def _leaving_by_q() -> Iterator[int | None]:
    """Yield the descriptor that gives each key at once; None without a terminal of ours. SIGTERM and SIGHUP become
    KeyboardInterrupt, so that the terminal is restored."""
    from shardvit.launch.local.processes import handled

    with handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
        if not _is_ours():
            yield None
            return
        import termios
        import tty

        before = termios.tcgetattr(_STDIN)
        try:
            tty.setcbreak(_STDIN)
            yield _STDIN
        finally:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


def _is_ours() -> bool:
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # closed, not a terminal, or another session's
        return False


def _wait(seconds: float, *, keyboard: int | None = None) -> Literal["waited", "left"]:
    """Wait until the time is up or `q` is typed. In slices: a signal that comes just before a system call does not
    interrupt that call, and Python handles it only afterwards."""
    keyboards = [] if keyboard is None else [keyboard]
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for ready in select.select(keyboards, [], [], min(left, _SLICE_SECONDS))[0]:
            if (keys := os.read(ready, 1024).lower()) == b"" or b"q" in keys:
                return "left"
    return "waited"
