"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP, to one rank, to `shardvit run`, and to everything; and a second Ctrl-C."""

import signal
import time

import pytest

from tests.faults.conftest import NewCase, Undisturbed
from tests.faults.harness import send
from tests.faults.rows import Row

STOPPED = (
    "SIGTERM, SIGINT, SIGUSR1 or SIGHUP (a terminal that is gone, without nohup) to any rank, to `shardvit run` or to "
    "everything: all ranks finish the step, save and exit 75; the same command resumes with nothing lost."
)
SECOND = "A second Ctrl-C ends everything at once, also in the middle of a save, and harms nothing on disk."

STEP = 26  # in which the signal comes; it is agreed upon in the next one
STOP_STEPS = 2


@pytest.mark.parametrize(
    ("number", "target"),
    [
        pytest.param(signal.SIGTERM, "a rank", id="SIGTERM-rank", marks=pytest.mark.fast),
        pytest.param(signal.SIGINT, "a rank", id="SIGINT-rank"),
        pytest.param(signal.SIGUSR1, "a rank", id="SIGUSR1-rank"),
        pytest.param(signal.SIGTERM, "shardvit run", id="SIGTERM-run"),
        pytest.param(signal.SIGINT, "shardvit run", id="SIGINT-run"),
        pytest.param(signal.SIGUSR1, "shardvit run", id="SIGUSR1-run"),
        pytest.param(signal.SIGHUP, "shardvit run", id="SIGHUP-run"),
        pytest.param(signal.SIGTERM, "everything", id="SIGTERM-everything"),
        pytest.param(signal.SIGINT, "everything", id="SIGINT-everything"),
        pytest.param(signal.SIGUSR1, "everything", id="SIGUSR1-everything"),
    ],
)
def test_asked_to_stop(
    number: signal.Signals, target: str, new_case: NewCase, undisturbed: Undisturbed, row: Row
) -> None:
    row.is_about(f"{number.name} to {target}", STOPPED)
    baseline, case = undisturbed(), new_case(changes={"engine.saving": "background"})
    hold = case.fault("hold", "between_steps", rank=0, step=STEP)
    attempt = case.start(how="srun" if target == "a rank" else "run", faults=[hold])
    attempt.wait_for_fault(hold)
    match target:
        case "a rank":
            send(attempt.ranks()[-1], number)
        case "shardvit run":
            attempt.process.send_signal(number)
        case _:
            for process in case.processes():
                send(process, number)
    if target != "a rank":
        time.sleep(2)  # for the way through `shardvit run`
    attempt.release(hold)
    row.ends(attempt.wait(), code=75, says="" if target == "a rank" else "the same command resumes")
    stopped = case.saved()[-1]
    assert STEP < stopped <= STEP + STOP_STEPS
    row.recovers(case, baseline, reached=stopped, at_most=0)


@pytest.mark.parametrize("saving", ["background", "blocking"])
def test_ctrl_c_twice_in_a_save(saving: str, new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about(f"second Ctrl-C in a save, {saving}", SECOND)
    baseline, case = undisturbed(), new_case(changes={"engine.saving": saving})
    pause = case.fault("sleep", "save.writing", rank=1, step=30, seconds=60)
    attempt = case.start(how="run", faults=[pause])
    attempt.wait_for_fault(pause)
    attempt.process.send_signal(signal.SIGINT)
    attempt.wait_for_text("Ctrl-C again")
    attempt.process.send_signal(signal.SIGINT)
    row.ends(attempt.wait(), code=75, says=r"not finished \(stopped\)")
    row.recovers(case, baseline, reached=30)
