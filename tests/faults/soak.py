"""`make soak`: a run that something happens to every 30 seconds, at random, ends as the one that nothing happened to.

    python -m tests.faults.soak [--minutes 20] [--every 30] [--seed 0] [--record FILE] [--folder FOLDER]

First the speed is measured, then the undisturbed run is done, then the disturbed one: `shardvit run --max-restarts`,
which is started again by this program where it was killed or stopped itself. Both take part of the given time; the
disturbed one about all of it. It ends with where the disturbed run's time went, from what the run recorded. Exit code
0: weights and curve are equal to the last bit and nothing is left behind.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shardvit.launch.bench.goodput_spent import spent
from shardvit.launch.bench.measure import heading
from shardvit.pipeline.checkpoint.store import damage_of
from shardvit.pipeline.runs.logs import iter_metrics
from shardvit.pipeline.runs.read import read_run, run_folder_at
from tests.faults.harness import Attempt, Case, pack_shards, send
from tests.faults.rows import Row

_STARTUP_SECONDS = 15.0  # of a restart, and what has to be done again: about so much is lost with each fault
_HANG_SECONDS = 15.0  # starting up is progress too, and slow on a busy machine
_POINTS = ("save.writing", "save.written", "save.manifest", "save.before_rename", "save.after_rename", "save.pruning")
_STOPPED = 75
_KEPT = 3


@dataclass
class Tally:
    """What has happened so far."""

    faults: Counter[str] = field(default_factory=Counter)
    lost_steps: int = 0
    restarts_by_run: int = 0
    restarts_by_soak: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the beginning."""
        line = f"{time.monotonic() - self.start:7.1f} s  {text}"
        self.lines.append(line)
        print(line, flush=True)


class Soak:
    """The disturbed run; fills `tally`."""

    def __init__(self, case: Case, *, seed: int, every_seconds: float, tally: Tally) -> None:
        self._case, self._every, self._tally = case, every_seconds, tally
        self._draw = random.Random(seed)
        self._triggers = {point: case.folder / f"trigger-{point}" for point in ("full disk", *_POINTS)}
        self._attempt: Attempt | None = None
        self._reached = self._seen_notes = 0
        self._faults: dict[str, Callable[[], None]] = {
            "kill -9 of a rank": lambda: self._any_rank().kill(),
            "kill -9 of all": lambda: self._running.kill_everything(),
            "kill -9 of shardvit run": lambda: self._running.process.kill(),
            "SIGTERM to shardvit run": lambda: send(self._supervisor, signal.SIGTERM),
            "Ctrl-C": lambda: send(self._supervisor, signal.SIGINT),
            "SIGTERM to a rank": lambda: send(self._any_rank(), signal.SIGTERM),
            "SIGUSR1 to a rank": lambda: send(self._any_rank(), signal.SIGUSR1),
            "SIGSTOP of a rank": lambda: send(self._any_rank(), signal.SIGSTOP),
            "kill -9 in a save": lambda: self._triggers[self._draw.choice(_POINTS)].touch(),
            "disk full in a save": lambda: self._triggers["full disk"].touch(),
            "kill -9 of all, newest checkpoint: a bit flipped": lambda: self._damage_newest(self._flip),
            "kill -9 of all, newest checkpoint: cut short": lambda: self._damage_newest(self._cut),
            "an older checkpoint: a bit flipped": lambda: self._flip(self._checkpoints()[-2]),
        }

    def run(self) -> None:
        """Start, disturb and start again until the run is done."""
        names = self._shuffled()
        self._start()
        next_fault, trains_since = time.monotonic() + self._every, None
        while True:
            time.sleep(0.25)
            code = self._running.process.poll()
            self._count_losses()
            if code is not None:
                if self._is_over(code):
                    return
                continue
            now = time.monotonic()
            trains_since = (trains_since or now) if self._is_training() else None
            # A while of training each time, or a slow machine would never save anything.
            if trains_since is None or now < max(next_fault, trains_since + self._every / 4):
                continue
            next_fault, trains_since = now + self._every, None
            name = next(names)
            try:
                self._faults[name]()
            except (psutil.Error, IndexError, OSError) as error:  # gone before it was struck
                self._tally.say(f"{name}: missed ({error})")
                continue
            self._tally.faults[name] += 1
            self._tally.say(f"{name}, at about step {self._reached:,}")

    @property
    def _running(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    def _any_rank(self) -> psutil.Process:
        return self._draw.choice(self._running.ranks())

    @property
    def _supervisor(self) -> psutil.Process:
        return psutil.Process(self._running.process.pid)

    def _shuffled(self) -> Any:
        """Every fault once in an order of chance, and again in another one, for ever."""
        while True:
            names = list(self._faults)
            self._draw.shuffle(names)
            yield from names

    def _start(self) -> None:
        kills = [{"action": "kill", "point": p, "trigger": str(self._triggers[p]), "once": None} for p in _POINTS]
        full = {"action": "enospc", "point": "save.writing", "trigger": str(self._triggers["full disk"]), "once": None}
        self._attempt = self._case.start("--max-restarts", "1000", how="run", faults=[*kills, full])

    def _is_over(self, code: int) -> bool:
        """Take note of how an attempt ended; start the next one unless the run is done."""
        output = self._running.output
        self._tally.restarts_by_run += len(re.findall(r"restart \d+ of 1000", output))
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        self._tally.codes[how] += 1
        if code == 0:
            return True
        last = next((line for line in reversed(output.splitlines()) if "shardvit:" in line), "")
        self._tally.say(f"shardvit run ended with {how}. {last}")
        if code not in (-signal.SIGKILL, 1, 2, _STOPPED) or (code in (2, _STOPPED) and "Traceback" in output):
            raise AssertionError(f"this is no way to end:\n{output}")
        self._wait_for_orphans()
        self._tally.restarts_by_soak += 1
        self._seen_notes = 0
        self._start()
        return False

    def _wait_for_orphans(self) -> None:
        """Ranks whose `shardvit run` was killed save and leave by themselves."""
        deadline = time.monotonic() + 120
        while alive := self._case.processes():
            if time.monotonic() > deadline:
                raise AssertionError(f"processes are left: {[process.cmdline() for process in alive]}")
            time.sleep(0.1)

    def _count_losses(self) -> None:
        """Look at where the attempts continue; metrics.jsonl is cut back to there a moment before they say so."""
        notes = re.findall(r"resuming from .*?step ([\d,]+) of", self._running.output, flags=re.DOTALL)
        for note in notes[self._seen_notes :]:
            step = int(note.replace(",", ""))
            lost = max(0, self._reached - step)
            self._tally.lost_steps += lost
            self._tally.say(f"resumes from step {step:,}: {lost:,} to be done again")
            self._reached = step
        self._seen_notes = len(notes)
        self._reached = max(self._reached, self._last_point()[0])

    def _last_point(self) -> tuple[int, float]:
        """Step and time of the curve's last point."""
        try:
            with (self._case.stage / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                found = re.findall(rb'^\{"step": (\d+),.*?"time": ([\d.]+),', file.read(), flags=re.MULTILINE)
        except FileNotFoundError:
            return 0, 0.0
        return (int(found[-1][0]), float(found[-1][1])) if found else (0, 0.0)

    def _is_training(self) -> bool:
        """Whether the ranks that are there now have added to the curve."""
        try:
            ranks = self._running.ranks()
            return len(ranks) == 2 and self._last_point()[1] > max(rank.create_time() for rank in ranks)
        except psutil.Error:
            return False

    def _checkpoints(self) -> list[Path]:
        return sorted((self._case.stage / "checkpoints").glob("step-*"))

    def _damage_newest(self, damage: Callable[[Path], None]) -> None:
        self._running.kill_everything()
        whole = [folder for folder in self._checkpoints() if not damage_of(folder)]
        if len(whole) < 2:
            raise IndexError("a second whole checkpoint is needed")
        damage(whole[-1])

    def _any_file(self, folder: Path) -> Path:
        return self._draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))

    def _flip(self, folder: Path) -> None:
        path = self._any_file(folder)
        content = bytearray(path.read_bytes())
        content[self._draw.randrange(len(content))] ^= 1 << self._draw.randrange(8)
        with path.open("r+b") as file:  # in place, as a disk does it
            file.write(content)

    def _cut(self, folder: Path) -> None:
        path = self._any_file(folder)
        os.truncate(path, self._draw.randrange(path.stat().st_size))


def changes(steps: int, save_steps: int) -> dict[str, object]:
    """The suite's recipe, so long."""
    return {
        "engine.hang_seconds": _HANG_SECONDS,
        "stages.pretrain.duration": f"{steps} steps",
        "stages.pretrain.save_every": f"{save_steps} steps",
        "stages.pretrain.log_every": "20 steps",
        "stages.pretrain.eval_every": "5%",
        "stages.pretrain.keep_checkpoints": _KEPT,
        "stages.pretrain.stochastic_depth": 0.1,
    }


def undisturbed(folder: Path, shards: Path, *, steps: int, save_steps: int) -> tuple[Case, float, float]:
    """A run to its end: it, its seconds in all, and its steps a second while it trains."""
    case = Case(folder, shards, changes=changes(steps, save_steps))
    ended = case.start(how="run").wait(patience_seconds=7200)
    if ended.code != 0:
        raise AssertionError(ended.output)
    rows = [row for row in iter_metrics(case.stage / "metrics.jsonl") if "train/loss" in row.metrics]
    return case, ended.seconds, (rows[-1].step - rows[0].step) / max(1e-3, rows[-1].time - rows[0].time)


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(prog="make soak", description="A run that faults befall at random.")
    parser.add_argument("--minutes", type=float, default=20.0, help="that the disturbed run takes, about")
    parser.add_argument("--steps", type=int, help="of the run; default: as many as that time has room for")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--record", type=Path, help="file for the log")
    parser.add_argument("--folder", type=Path, help="where to work, kept; default: a temporary one")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="shardvit-soak-"))
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    tally = Tally()
    try:
        code = soak(options, folder, tally)
    except AssertionError as error:
        tally.say(f"FAILED: {error}")
        code = 1
    finally:
        if options.record:
            options.record.write_text("\n".join(tally.lines) + "\n", encoding="utf-8")
    if options.folder is None and code == 0:
        shutil.rmtree(folder)
    else:
        print(f"everything is in {folder}")
    return code


def soak(options: argparse.Namespace, folder: Path, tally: Tally) -> int:
    """Measure, run undisturbed, run disturbed, compare; the exit code."""
    tally.say(f"soak of {options.minutes:g} minutes, a fault every {options.every:g} s, seed {options.seed}")
    tally.say(heading("torch", "deepspeed"))
    shards = pack_shards(folder / "shards")
    _, _, speed = undisturbed(folder / "measured", shards, steps=400, save_steps=100)
    share = max(0.25, 1 - _STARTUP_SECONDS / options.every)
    steps = options.steps or max(200, int(speed * options.minutes * 60 * share / 100) * 100)
    save_steps = max(10, int(speed * 2))
    tally.say(f"{speed:.0f} steps a second: {steps:,} steps, a checkpoint every {save_steps}")
    baseline, quiet_seconds, _ = undisturbed(folder / "undisturbed", shards, steps=steps, save_steps=save_steps)
    tally.say(f"the undisturbed run took {quiet_seconds:.0f} s")

    case = Case(folder / "disturbed", shards, changes=changes(steps, save_steps))
    start, started = time.monotonic(), time.time()
    try:
        Soak(case, seed=options.seed, every_seconds=options.every, tally=tally).run()
    finally:
        for process in case.processes():
            send(process, signal.SIGKILL)
    seconds, went = (
        time.monotonic() - start,
        spent(read_run(run_folder_at(case.run)), started=started, ended=time.time()),
    )
    row = Row(name="soak")
    row.equals(case, baseline)
    # Signals save at steps of their own; stacks of what hung stay for whoever looks into it.
    row.leaves_nothing(case, baseline, besides=["checkpoints/step-", "ranks/stack-rank-"])
    if len(case.saved()) > _KEPT:
        raise AssertionError(f"{len(case.saved())} checkpoints are kept instead of {_KEPT}")
    for name, count in sorted(tally.faults.items()):
        tally.say(f"{count:4d} x {name}")
    num_faults = sum(tally.faults.values())
    codes = ", ".join(f"{count} x {how}" for how, count in sorted(tally.codes.items()))
    tally.say(f"{num_faults} faults in {seconds:.0f} s; shardvit run ended: {codes}")
    tally.say(
        f"restarts: {tally.restarts_by_run} by --max-restarts, {tally.restarts_by_soak} by the same command again"
    )
    tally.say(
        f"{tally.lost_steps:,} steps were done again, {tally.lost_steps / max(1, num_faults):.0f} a fault (there is a "
        f"checkpoint every {save_steps} steps); it took {seconds / quiet_seconds:.2f} times as long as undisturbed"
    )
    for line in went.lines():
        tally.say(line)
    tally.say(f"verdict: passed; weights and curve {row.continued}, left behind: {row.left_behind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
