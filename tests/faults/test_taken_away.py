"""What is taken from a run while it is at work: its output, its folder; and afterwards: its record."""

import shutil

import pytest

from shardvit.pipeline.checkpoint.store import damage_of
from tests.faults.conftest import NewCase, Undisturbed
from tests.faults.harness import STEPS
from tests.faults.rows import Row

OUTPUT = (
    "Output that disappears (a reader that leaves as `head` does, a terminal that is gone, a full disk, closed "
    "streams) ends no training: metrics.jsonl has everything."
)
GONE = (
    "A run folder that is deleted or renamed in mid-run ends the run within seconds, with one sentence and exit code "
    "2; nothing is made in its place, and put back, it resumes by the same command."
)
RECORD = (
    "A stage.json that cannot be read is made again from the newest whole checkpoint by the same command and kept "
    "beside; no step is trained twice."
)
STEP = 25


@pytest.mark.parametrize(
    "shell", [pytest.param("2>&1 | head -3", marks=pytest.mark.fast), ">/dev/full 2>&1", "<&- >&- 2>&-"]
)
def test_output_that_disappears(shell: str, new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about(f"shardvit run {shell}", OUTPUT)
    baseline, case = undisturbed(), new_case()
    row.ends(case.start(how="run", shell=f"{shell}; exit ${{PIPESTATUS[0]}}").wait(), code=0)
    row.is_unharmed(case, baseline)


@pytest.mark.parametrize("how", ["srun", pytest.param("run", marks=pytest.mark.fast)])
def test_a_run_folder_that_is_renamed(how: str, new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about(f"the run folder is renamed in mid-run, {how}", GONE)
    baseline, case = undisturbed(), new_case()
    hold = case.fault("hold", "between_steps", rank=0, step=STEP)
    attempt = case.start(how=how, faults=[hold])
    attempt.wait_for_fault(hold)
    elsewhere = case.run.with_name("renamed")
    case.run.rename(elsewhere)
    attempt.release(hold)
    ended = attempt.wait()
    row.ends(ended, code=2, says="is gone: it was deleted or renamed")
    assert ended.output.count("is gone: it was") == 1 and "taken over" not in ended.output, ended.output
    case.wait_until_all_have_ended()
    assert not case.run.exists()
    checkpoints = list(elsewhere.glob("pretrain/checkpoints/step-*"))
    assert checkpoints and all(damage_of(checkpoint) == "" for checkpoint in checkpoints)
    elsewhere.rename(case.run)
    row.recovers(case, baseline, reached=STEP, besides=[".rendezvous-"])


@pytest.mark.parametrize("broken", ["", '{"state": "done", "images_seen": "many"}'], ids=["empty", "a wrong type"])
def test_a_record_that_is_broken(broken: str, new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about(f"stage.json of a finished stage is broken: {broken or 'empty'}", RECORD)
    baseline, case = undisturbed(), new_case()
    shutil.copytree(baseline.run, case.run)
    (case.stage / "stage.json").write_text(broken)
    continued = case.start().wait()
    row.ends(continued, code=0, says="was broken")
    assert (case.stage / "stage.json.broken").read_text() == broken
    row.recovers(case, baseline, continued, reached=STEPS, at_most=0, besides=["stage.json.broken"])
