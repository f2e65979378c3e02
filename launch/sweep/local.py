"""Run a sweep on this machine: each run in turn, then the choice and the final run. Resumable.

Checks all runs before the first starts. A failed point does not end the sweep, and the next command retries it.
A user error or full disk (exit code 2) or a stop (75) ends it.
"""

import signal
from collections.abc import Callable

from shardvit.data_shards.errors import UserError
from shardvit.launch.local.output import say
from shardvit.launch.local.processes import handled
from shardvit.launch.run.lock import locked
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.launch.sweep.grid import extend_grid
from shardvit.launch.sweep.points import FINAL, Point, SharedStage, Sweep, open_point
from shardvit.launch.sweep.record import SweepRecord, as_table, choose, failures, log_to_mlflow, make_record
from shardvit.pipeline.recipe.io import differences, parse_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, RECIPE_FILE

_MOST_EXTENSIONS = 3


def check_sweep(sweep: Sweep) -> None:
    """Check every run as `shardvit run` does; UserError if one could not start."""
    for _, recipe, restart in sweep.runs():
        PipelineRun.open(recipe, runs_root=sweep.root, restart=restart)


def run_sweep(sweep: Sweep, *, max_restarts: int = 0, widen: Callable[..., Sweep] | None = None) -> int:
    """Run what is not done; returns the exit code. `widen` re-plans the sweep with another `grid=`, up to three times
    while the best point is at an edge. UserError if a run would not start or another process holds the sweep;
    KeyboardInterrupt if stopped between stages."""
    check_sweep(sweep)
    interrupting = handled((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.default_int_handler)
    with interrupting, locked(sweep.root / ".sweep.lock", what=f"sweep {sweep.root}"):
        return _LocalSweep(sweep, max_restarts=max_restarts, widen=widen).run()


class _LocalSweep:
    def __init__(self, sweep: Sweep, *, max_restarts: int, widen: Callable[..., Sweep] | None) -> None:
        self._sweep, self._max_restarts, self._widen = sweep, max_restarts, widen
        self._tried = set[str]()  # points run by this command
        self._failed = failures(sweep.root)
        self._chosen: Point | None = None

    def run(self) -> int:
        self._write()
        log_to_mlflow(self._sweep, self._record(), status="RUNNING")
        code = EXIT_FAILED
        try:
            code = self._run_all()
        except KeyboardInterrupt:
            code = EXIT_STOPPED
            raise
        finally:
            self._write()
            ended = "FINISHED" if code == 0 else "KILLED" if code == EXIT_STOPPED else "FAILED"
            log_to_mlflow(self._sweep, self._record(), status=ended)
        print(f"\n{as_table(self._record())}", flush=True)
        return code

    def _run_all(self) -> int:
        extensions = 0
        while True:
            if code := self._run_points():
                return code
            if extensions == _MOST_EXTENSIONS or not self._extend():
                break
            extensions += 1
        sweep, best = self._sweep, choose(self._record().points)
        if best is None:
            say(f"none of the {len(sweep.points)} points can be chosen, see the table; their runs are in {sweep.root}")
            return EXIT_FAILED
        self._chosen = chosen = next(point for point in sweep.points if point.name == best.name)
        self._print(f"final run, as {best.name}, on all training images")
        begin_final(sweep, chosen)
        return self._run_one(FINAL, chosen.final, shared=chosen.shared)

    def _run_points(self) -> int:
        """Run the shared stages, then the points; a nonzero code ends the sweep."""
        sweep = self._sweep
        for shared in sweep.shared_stages:
            if shared.folder.runs_root != sweep.root:
                self._print(f"{shared.stage} is taken from {shared.folder.path}")
                continue
            self._print(f"{shared.stage}, once for all points that share it")
            if code := self._execute(shared.recipe):
                return code
        for number, point in enumerate(sweep.points, start=1):
            if point.name not in self._tried:
                self._print(f"point {number} of {len(sweep.points)}: {point.name}")
                code = self._run_one(point.name, point.recipe, shared=point.shared)
                if code in (EXIT_STOPPED, EXIT_USER_ERROR):
                    return code
        self._tried = {point.name for point in sweep.points}
        return 0

    def _extend(self) -> bool:
        sweep, best = self._sweep, choose(self._record().points)
        if self._widen is None or best is None:
            return False
        axes = extend_grid(sweep.axes, [point.values for point in sweep.points], best=best.values)
        if axes == sweep.axes:
            return False
        try:
            wider = self._widen(grid=axes)
            check_sweep(wider)
        except UserError as error:
            say(f"the grid is not widened: {error}")
            return False
        self._sweep = wider
        self._print(f"{best.name} lies at the edge: the grid is widened to {len(wider.points)} points")
        return True

    def _run_one(self, name: str, recipe: Recipe, *, shared: SharedStage | None) -> int:
        folder = self._sweep.folder(name)
        folder.check_recipe(recipe)
        open_point(folder, recipe, shared=shared)
        self._failed.pop(name, None)
        code = self._execute(recipe)
        if code not in (0, EXIT_STOPPED):
            step = folder.peek(recipe.stages.names[-1]).last_saved_step
            self._failed[name] = f"exit code {code} after step {step:,}"
        self._write()
        return code

    def _execute(self, recipe: Recipe) -> int:
        return PipelineRun.open(recipe, runs_root=self._sweep.root).execute(max_restarts=self._max_restarts)

    def _record(self) -> SweepRecord:
        return make_record(self._sweep, failed=self._failed, chosen=self._chosen)

    def _write(self) -> None:
        self._sweep.root.mkdir(parents=True, exist_ok=True)
        self._record().write(self._sweep.root)

    def _print(self, text: str) -> None:
        print(f"\n== {self._sweep.root.name}: {text} ==", flush=True)


def begin_final(sweep: Sweep, chosen: Point) -> None:
    """Move aside a final run that an earlier grid chose with other values."""
    folder = sweep.folder(FINAL)
    path = folder.path / RECIPE_FILE
    if path.exists() and differences(parse_recipe(path), chosen.final):
        for note in folder.open(chosen.final, restart=chosen.final.stages.names[0]):
            print(note, flush=True)
