"""What nobody kills but goes wrong: a rank that hangs or is slow, a dead worker, a clock that jumps, a second run."""

import pytest

from shardvit.pipeline.runs.logs import read_events
from tests.faults.conftest import NewCase, Undisturbed
from tests.faults.harness import STEPS
from tests.faults.rows import Row

HANGS = (
    "A rank that hangs is named after engine.hang_seconds, with its host, process, last step and, unless it is "
    "stopped, stack; the run ends with an error, and --max-restarts resumes by itself."
)
SLOW = (
    "A rank that takes engine.slow_rank_factor times as long as the others over four points of the curve in a row, and "
    "makes them wait for engine.slow_rank_seconds, is named while training continues."
)
SLOW_STOPS = (
    "With engine.slow_rank: stop, a rank that stays slow for twice as many points, and has made the others wait ten "
    "times as long, ends the run after everything is saved."
)
WORKER = "A reading process that is killed ends the run with its name; the same command resumes from the last save."
CLOCK = "A clock that jumps by a day changes nothing: not the training, not the time-outs, not the checkpoints."
TWO_RUNS = "A second run on the same folder is refused and told who is at work there; the first does not notice."
CRASH_LOOP = "A run that fails at the same place again and again is not restarted for ever, and what is saved stands."

STEP = 26
LOG_STEPS = 7  # of the suite's recipe
HANG = {"engine.hang_seconds": 15}  # starting up is progress too, and slow on a busy machine
STACKS = ("ranks/stack-rank-",)  # stay for whoever looks into it


@pytest.mark.parametrize(
    ("action", "point"),
    [
        pytest.param("stop", "between_steps", id="SIGSTOP"),
        pytest.param("sleep", "forward", id="forward"),
        pytest.param("sleep", "save.begin", id="save"),
        pytest.param("sleep", "evaluation", id="evaluation"),
    ],
)
def test_a_rank_hangs(action: str, point: str, new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("SIGSTOP of a rank" if action == "stop" else f"a rank hangs, {point}", HANGS)
    baseline, case = undisturbed(), new_case(changes=HANG)
    step = {"evaluation": 24, "save.begin": 30}.get(point, STEP)
    fault = case.fault(action, point, rank=1, step=step, seconds=3600)
    ended = case.start(faults=[fault]).wait()
    row.ends(ended, code=(1, 137), says=r"rank 1 .*hangs")
    stack = (case.stage / "ranks" / "stack-rank-1.txt").read_text(encoding="utf-8")
    assert "it is stopped by a signal" in ended.output if action == "stop" else "train_loop.py" in stack
    row.recovers(case, baseline, case.start("engine.hang_seconds=900").wait(), reached=step, besides=STACKS)


def test_a_rank_hangs_with_max_restarts(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("a rank hangs, --max-restarts 1", HANGS)
    baseline, case = undisturbed(), new_case(changes=HANG)
    fault = case.fault("sleep", "forward", rank=0, step=STEP, seconds=3600)
    ended = case.start("--max-restarts", "1", how="run", faults=[fault]).wait()
    row.ends(ended, code=0, says=r"rank 0 .*hangs")
    assert "restart 1 of 1" in ended.output
    row.recovers(case, baseline, ended, reached=STEP, besides=STACKS)


def slow_forward(case) -> dict:
    """Every forward pass of rank 1 takes a tenth of a second longer."""
    return {**case.fault("sleep", "forward", rank=1, seconds=0.1), "once": None}


def test_a_slow_rank_is_named(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("a rank is slow", SLOW)
    baseline, case = undisturbed(), new_case()
    row.ends(case.start(faults=[slow_forward(case)]).wait(), code=0, says="rank 1 .*is slow")
    named = [event.step for event in read_events(case.stage / "events.jsonl") if event.kind == "slow_rank"]
    assert (
        named and 4 * LOG_STEPS <= named[0] <= 8 * LOG_STEPS
    )  # the fourth point, or later if the other one was held up
    row.is_unharmed(case, baseline)


def test_a_slow_rank_stops_the_run(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("a rank is slow, engine.slow_rank stop", SLOW_STOPS)
    often = {"stages.pretrain.log_every": "2 steps"}
    baseline = undisturbed(changes=often)
    case = new_case(changes={**often, "engine.slow_rank": "stop", "engine.slow_rank_seconds": 0.2})
    ended = case.start(faults=[slow_forward(case)]).wait()
    row.ends(ended, code=1, says="is saved")
    stopped = case.saved()[-1]
    assert 16 <= stopped < STEPS and f"everything up to step {stopped} is saved" in ended.output
    row.recovers(case, baseline, reached=stopped, at_most=0)


def test_a_worker_process_is_killed(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("kill -9 of a reading process", WORKER)
    baseline, case = undisturbed(), new_case(changes={"data.workers": 1, "data.worker_kind": "process"})
    fault = case.fault("kill", "batch", rank=1, nth=2 * STEP)  # two micro-batches a step
    row.ends(case.start(faults=[fault]).wait(), code=1, says="worker")
    row.recovers(case, baseline, reached=STEP)


@pytest.mark.parametrize("days", [1, -1])
def test_the_clock_jumps(days: int, new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about(f"the clock jumps by {days:+d} day", CLOCK)
    baseline, case = undisturbed(), new_case(changes={**HANG, "stages.pretrain.save_every_minutes": 5})
    faults = [case.fault("clock", "between_steps", rank=rank, step=STEP, seconds=86400 * days) for rank in (0, 1)]
    row.ends(case.start(faults=faults).wait(), code=0)
    row.is_unharmed(case, baseline)


def test_two_runs_on_one_folder(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("two runs on one folder", TWO_RUNS)
    baseline, case = undisturbed(), new_case()
    pause = case.fault("sleep", "between_steps", rank=0, step=STEP, seconds=8)
    first = case.start(how="run", faults=[pause])
    first.wait_for_fault(pause)
    row.ends(case.start(how="run").wait(), code=2, says=rf"in use by process {first.process.pid} ")
    ended = first.wait()
    assert ended.code == 0, ended.output
    row.is_unharmed(case, baseline)


def test_a_crash_loop_stops(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("fails again and again, --max-restarts 9", CRASH_LOOP)
    baseline, case = undisturbed(), new_case()
    fault = {**case.fault("raise", "between_steps", rank=0, step=STEP), "once": None}
    ended = case.start("--max-restarts", "9", how="run", faults=[fault]).wait()
    row.ends(ended, code=1, says="another one would fail in the same way")
    row.recovers(case, baseline, reached=STEP)
