"""kill -9 of a rank, of the launcher, of `shardvit run`, and of everything, at every point of a step and of a save."""

import pytest

from tests.faults.conftest import NewCase, Undisturbed
from tests.faults.harness import SAVE_STEPS, send
from tests.faults.rows import Row

A_RANK = (
    "A killed rank ends the run within seconds; the same command resumes from the last save and ends as if nothing had "
    "happened."
)
EVERYTHING = "After a power failure the same command resumes from the last save and ends as if nothing had happened."
IN_A_SAVE = (
    "Whatever is killed during a save, the checkpoint is there wholly or not at all, and the one before it stands."
)
SUPERVISOR = (
    "When only `shardvit run` or the launcher is killed, the ranks do not live on, and the same command resumes."
)
RESTARTED = "With --max-restarts, `shardvit run` resumes by itself after a rank was killed."

ZERO_3 = {"engine.zero_stage": 3, "engine.precision": "fp32"}
STEP = 26  # the step that is hit; the save before it is that of step 20
SAVE = 30  # the save that is hit


BACKGROUND = {"engine.saving": "background"}


@pytest.mark.parametrize(
    ("point", "victims", "changes"),
    [
        ("between_steps", "rank", {}),
        ("forward", "rank", ZERO_3),
        ("backward", "rank", {}),
        ("optimizer", "rank", ZERO_3),
        ("evaluation", "rank", {}),
        ("between_steps", "everything", BACKGROUND),
        ("forward", "everything", BACKGROUND),
        ("backward", "everything", ZERO_3),
        ("optimizer", "everything", BACKGROUND),
        ("evaluation", "everything", ZERO_3),
    ],
)
def test_killed_in_a_step(
    point: str, victims: str, changes: dict[str, object], new_case: NewCase, undisturbed: Undisturbed, row: Row
) -> None:
    row.is_about(f"kill -9 of {victims}, {point.replace('_', ' ')}", A_RANK if victims == "rank" else EVERYTHING)
    baseline, case = undisturbed(ZERO_3 if changes == ZERO_3 else {}), new_case(changes=changes)
    step = 24 if point == "evaluation" else STEP
    fault = case.fault("kill" if victims == "rank" else "kill_all", point, rank=1, step=step)
    ended = case.start(faults=[fault]).wait()
    row.ends(ended, code=137 if victims == "rank" else -9, says="is gone" if victims == "rank" else "")
    case.wait_until_all_have_ended()
    # In the background the save of step 20 may still be on its way to the disk, and then that of step 10 counts.
    row.recovers(case, baseline, reached=step, at_most=2 * SAVE_STEPS if changes == BACKGROUND else SAVE_STEPS)


PHASES = {  # point -> the steps that are lost of those up to the save
    "save.begin": SAVE_STEPS,
    "save.snapshot": SAVE_STEPS,
    "save.writing": SAVE_STEPS,
    "save.written": SAVE_STEPS,
    "save.manifest": SAVE_STEPS,
    "save.before_rename": SAVE_STEPS,
    "save.after_rename": 0,
    "save.pruning": 0,
}
# Every phase with either victim and either way of saving, but not all four together.
IN_SAVES = [
    *((point, "rank", "blocking") for point in PHASES),
    *((point, "everything", "background") for point in PHASES),
    *((point, "rank", "background") for point in ("save.snapshot", "save.before_rename")),
]
FAST = ("save.writing", "everything", "background")


@pytest.mark.parametrize(
    ("point", "victims", "saving"),
    [pytest.param(*each, id="-".join(each), marks=[pytest.mark.fast] if each == FAST else []) for each in IN_SAVES],
)
def test_killed_in_a_save(
    point: str, victims: str, saving: str, new_case: NewCase, undisturbed: Undisturbed, row: Row
) -> None:
    row.is_about(f"kill -9 of {victims}, {point}, {saving}", IN_A_SAVE)
    baseline, case = undisturbed(), new_case(changes={"engine.saving": saving})
    # What all ranks do is hit on the one that does not commit.
    rank = 1 if point in ("save.begin", "save.snapshot", "save.writing", "save.written") else "any"
    # The checkpoint that goes when that of step 30 is there is that of step 10.
    step = SAVE - 2 * SAVE_STEPS if point == "save.pruning" else SAVE
    fault = case.fault("kill" if victims == "rank" else "kill_all", point, rank=rank, step=step)
    row.ends(case.start(faults=[fault]).wait(), code=137 if victims == "rank" else -9)
    case.wait_until_all_have_ended()
    row.recovers(case, baseline, reached=SAVE)
    assert row.lost == (f"{PHASES[point]} steps" if PHASES[point] else "nothing")


def test_only_shardvit_run_is_killed(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("kill -9 of shardvit run alone", SUPERVISOR)
    baseline, case = undisturbed(), new_case()
    pause = case.fault("sleep", "between_steps", rank=0, step=STEP, seconds=3)
    attempt = case.start(how="run", faults=[pause])
    attempt.wait_for_fault(pause)
    attempt.process.kill()
    row.ends(attempt.wait(), code=-9)
    # `shardvit run` again, which also clears away what the killed one left for its ranks to meet at
    row.recovers(case, baseline, case.start(how="run").wait(), reached=STEP)


@pytest.mark.parametrize("victim", ["first", "second"])
def test_only_a_process_of_deepspeeds_launcher_is_killed(
    victim: str, new_case: NewCase, undisturbed: Undisturbed, row: Row
) -> None:
    row.is_about(f"kill -9 of deepspeed's {victim} process alone", SUPERVISOR)
    baseline, case = undisturbed(), new_case()
    pause = case.fault("sleep", "between_steps", rank=0, step=STEP, seconds=3)
    attempt = case.start(how="deepspeed", faults=[pause])
    attempt.wait_for_fault(pause)
    send(attempt.launchers()[0 if victim == "first" else 1], 9)
    row.ends(attempt.wait(), code=-9 if victim == "first" else {0, 247})  # its own word for a child that was killed
    case.wait_until_all_have_ended()  # the ranks, which save first
    row.recovers(case, baseline, reached=STEP)


def test_a_killed_rank_with_max_restarts(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("kill -9 of rank, --max-restarts 1", RESTARTED)
    baseline, case = undisturbed(), new_case()
    fault = case.fault("kill", "backward", rank=1, step=STEP)
    ended = case.start("--max-restarts", "1", how="run", faults=[fault]).wait()
    row.ends(ended, code=0, says="a process was killed by signal 9")
    assert "restart 1 of 1 from step 20" in ended.output and "Traceback" not in ended.output
    assert not list(case.run.glob(".rendezvous*"))
    row.recovers(case, baseline, ended, reached=STEP)
