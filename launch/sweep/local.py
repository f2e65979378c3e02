"""Run a sweep on this machine: one run after another, then the choice and the final run. Resumable.

All runs are checked before the first one starts. A point that fails is retried by the next command and does not keep
the others from running; a mistake or a full disk (exit code 2) and a stop (75) end the sweep.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from data_shards.errors import UserError
from launch.local.output import say
from launch.local.processes import handled
from launch.run.lock import locked
from launch.run.pipeline_run import PipelineRun
from launch.sweep.points import FINAL, Earlier, Point, Sweep, link_earlier
from launch.sweep.record import SweepRecord, as_table, choose, failures, make_record, tell
from launch.sweep.worth import widened
from pipeline.recipe.io import differences, parse_recipe
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, RECIPE_FILE

_MOST_WIDENINGS = 3


def check_sweep(sweep: Sweep) -> None:
    """Check every run that is not done, as `shardvit run` does; UserError for what would keep one from running."""
    for _, recipe, restart in sweep.runs():
        PipelineRun.open(recipe, runs_root=sweep.root, restart=restart)


def run_sweep(sweep: Sweep, *, max_restarts: int = 0, widen: Callable[..., Sweep] | None = None) -> int:
    """Run what is not done; returns the exit code. `widen`: plans it with another `grid=`, if that is to be widened
    while the best point lies at its edge, at most three times.

    Raises:
        UserError: a run would not start, or the sweep is in use by another process.
        KeyboardInterrupt: stopped between two stages.
    """
    check_sweep(sweep)
    interrupting = handled((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.default_int_handler)
    with interrupting, locked(sweep.root / ".sweep.lock", what=f"sweep {sweep.root}"):
        return _Running(sweep, max_restarts=max_restarts, widen=widen).run()


class _Running:
    def __init__(self, sweep: Sweep, *, max_restarts: int, widen: Callable[..., Sweep] | None) -> None:
        self._sweep, self._max_restarts, self._widen = sweep, max_restarts, widen
        self._ended, self._widenings = set[str](), 0  # points that this command has run
        self._failed = failures(sweep.root)
        self._chosen: Point | None = None

    def run(self) -> int:
        sweep = self._sweep
        self._write()
        tell(sweep, self._record(), status="RUNNING")
        code = EXIT_FAILED
        try:
            code = self._run_all()
        except KeyboardInterrupt:
            code = EXIT_STOPPED
            raise
        finally:
            self._write()
            ended = "FINISHED" if code == 0 else "KILLED" if code == EXIT_STOPPED else "FAILED"
            tell(sweep, self._record(), status=ended)
        print(f"\n{as_table(self._record())}", flush=True)
        return code

    def _run_all(self) -> int:
        if code := self._run_points():
            return code
        sweep, best = self._sweep, choose(self._record().points)
        if best is None:
            say(f"none of the {len(sweep.points)} points can be chosen, see the table; their runs are in {sweep.root}")
            return EXIT_FAILED
        self._chosen = next(point for point in sweep.points if point.name == best.name)
        self._say(f"final run, as {best.name}, on all training images")
        begin_final(sweep, self._chosen)
        return self._run_one(FINAL, self._chosen.final, earlier=self._chosen.earlier)

    def _run_points(self) -> int:
        """The points, those of a wider grid too, and what comes before them; not 0: the sweep ends with this code."""
        sweep = self._sweep
        for earlier in sweep.earlier:
            if code := self._run_earlier(earlier):
                return code
        for number, point in enumerate(sweep.points, start=1):
            if point.name not in self._ended:
                self._say(f"point {number} of {len(sweep.points)}: {point.name}")
                code = self._run_one(point.name, point.recipe, earlier=point.earlier)
                if code in (EXIT_STOPPED, EXIT_USER_ERROR):
                    return code
        self._ended = {point.name for point in sweep.points}
        return self._run_points() if self._is_widened() else 0

    def _is_widened(self) -> bool:
        """Widen the grid, if that is wished, the best point lies at its edge, and the recipe takes what lies beyond."""
        sweep, best = self._sweep, choose(self._record().points)
        if self._widen is None or best is None or self._widenings == _MOST_WIDENINGS:
            return False
        axes = widened(sweep.axes, [point.values for point in sweep.points], best=best.values)
        if axes == sweep.axes:
            return False
        try:
            self._sweep = self._widen(grid=axes)
            check_sweep(self._sweep)
        except UserError as error:
            say(f"the grid is not widened: {error}")
            self._sweep = sweep
            return False
        self._widenings += 1
        self._say(f"{best.name} lies at the edge: the grid is widened to {len(self._sweep.points)} points")
        return True

    def _run_earlier(self, earlier: Earlier) -> int:
        stage, folder = earlier.stage, earlier.folder
        if folder.runs_root != self._sweep.root:
            self._say(f"{stage} is taken from {folder.path}")
            return 0
        self._say(f"{stage}, once for all points that share it")
        return PipelineRun.open(earlier.recipe, runs_root=self._sweep.root).execute(max_restarts=self._max_restarts)

    def _run_one(self, name: str, recipe: Recipe, *, earlier: Earlier | None) -> int:
        """Run or resume one run folder, and note how it ended."""
        folder = self._sweep.folder(name)
        folder.check_recipe(recipe)
        link_earlier(folder, recipe, earlier=earlier)
        self._failed.pop(name, None)
        code = PipelineRun.open(recipe, runs_root=self._sweep.root).execute(max_restarts=self._max_restarts)
        if code not in (0, EXIT_STOPPED):
            record = folder.peek(recipe.stages.names[-1])
            self._failed[name] = f"exit code {code} after step {record.last_saved_step:,}"
        self._write()
        return code

    def _record(self) -> SweepRecord:
        return make_record(self._sweep, failed=self._failed, chosen=self._chosen)

    def _write(self) -> None:
        self._sweep.root.mkdir(parents=True, exist_ok=True)
        self._record().write(self._sweep.root)

    def _say(self, what: str) -> None:
        print(f"\n== {self._sweep.root.name}: {what} ==", flush=True)


def begin_final(sweep: Sweep, chosen: Point) -> None:
    """Move a final run with other values aside, which was chosen from another grid."""
    folder = sweep.folder(FINAL)
    path = folder.path / RECIPE_FILE
    if path.exists() and differences(parse_recipe(path), chosen.final):
        for note in folder.open(chosen.final, restart=chosen.final.stages.names[0]):
            print(note, flush=True)
