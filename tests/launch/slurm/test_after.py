"""What becomes of a job when srun is gone."""

from pathlib import Path
from typing import Any

import pytest

from shardvit.launch.slurm.after import Ending, decide, main
from shardvit.launch.slurm.records import End, Kind, read_ends, write_cancelled
from shardvit.pipeline.runs.run_folder import RunFolder, StageRecord

RUNNING = StageRecord(state="running", last_saved_step=40)


def ending(**changes: Any) -> Ending:
    return Ending(**{"job": "7", "code": 75, "signal": "USR1", "queue": "RUNNING/None", **changes})


def end(kind: Kind, step: int) -> End:
    return End(job="7", time=0.0, kind=kind, code=1, last_saved_step=step, sentence="")


def code(how: Ending, *earlier: End, record: StageRecord = RUNNING, max_restarts: int = 20) -> int:
    return decide(how, record=record, earlier=earlier, max_restarts=max_restarts, cancelled=False).code


@pytest.mark.parametrize(
    "how", [ending(), ending(code=0), ending(code=1), ending(code=2), ending(queue="COMPLETING/None")]
)
def test_a_stage_that_is_done_is_done_however_srun_ended(how: Ending):
    assert code(how, record=StageRecord(state="done")) == 0


def test_cancelled_stays_cancelled_whatever_it_would_be():
    for how in (ending(), ending(code=1), ending(code=2)):
        verdict = decide(how, record=RUNNING, earlier=[], max_restarts=20, cancelled=True)
        assert verdict.code == 1 and "cancelled" in verdict.sentence and "step 40" in verdict.sentence


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (ending(), 75),
        (ending(code=138), 75),  # before the handlers were there
        (ending(code=1, signal="none"), 75),
        (ending(code=0, signal="none"), 75),  # a launcher that was killed
        (ending(code=137, signal="none"), 75),
        (ending(signal="none"), 75),  # preempted: the processes were told, the batch script was not
        (ending(queue=""), 75),  # the controller did not answer
        (ending(code=2, signal="none"), 2),
        (ending(code=2), 2),
        (ending(queue="COMPLETING/None"), 1),  # cancelled, preempted or requeued: SLURM's affair
        (ending(queue="COMPLETING/NodeDown", signal="TERM"), 1),
        (ending(queue="PENDING/BeginTime", signal="TERM"), 1),
        (ending(queue="COMPLETING/TimeLimit"), 75),  # saving took longer than the time that was left
    ],
)
def test_the_first_end(how: Ending, expected: int):
    assert code(how) == expected


def test_progress_keeps_it_going_for_ever():
    steps = [end("stopped", step) for step in range(0, 1000, 10)]
    assert code(ending(), *steps, record=StageRecord(state="running", last_saved_step=1000)) == 75


@pytest.mark.parametrize("kind", ["stopped", "failed"])
def test_two_attempts_without_progress_are_the_end(kind: Kind):
    how = ending() if kind == "stopped" else ending(code=1, signal="none")
    assert code(how, end(kind, 40)) == 75
    assert code(how, end(kind, 40), end(kind, 40)) == 1
    assert code(how, end(kind, 40), end(kind, 40), end(kind, 30)) == 75  # further than at the last one


def test_a_crash_and_a_stop_at_the_same_step_count_together():
    assert code(ending(), end("failed", 40), end("stopped", 40)) == 1


def test_jobs_that_slurm_takes_away_count_for_nothing():
    taken = [end("taken away", 40)] * 10
    assert code(ending(), *taken) == 75
    assert code(ending(signal="none"), *[end("failed", 40)] * 2) == 75


def test_crashes_are_counted_and_stops_are_not():
    how = ending(code=1, signal="none")
    record = StageRecord(state="running", last_saved_step=100)
    assert code(how, end("failed", 10), end("stopped", 20), record=record, max_restarts=2) == 75
    assert code(how, end("failed", 10), end("failed", 20), record=record, max_restarts=2) == 1
    assert code(how, record=record, max_restarts=0) == 1
    assert code(ending(), *[end("stopped", step) for step in range(50)], record=record, max_restarts=0) == 75


def test_the_sentences_say_why_and_from_where():
    given_up = decide(
        ending(), record=RUNNING, earlier=[end("stopped", 40)] * 2, max_restarts=20, cancelled=False
    ).sentence
    assert "saved no later step" in given_up and "--time" in given_up and "step 40" in given_up
    requeued = decide(ending(), record=StageRecord(), earlier=[], max_restarts=20, cancelled=False).sentence
    assert requeued == "not finished (signal USR1): requeued, it resumes from its beginning"


def ask(run: Path, *arguments: str) -> int:
    common = [str(run), "--stage", "pretrain", "--job", "7", "--queue", "RUNNING/None", "--max-restarts", "20"]
    return main([*common, *arguments])


def test_the_batch_script_asks_and_the_end_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "law"
    folder = RunFolder(runs_root=tmp_path, name="law")
    run.mkdir()
    folder.update("pretrain", state="running", last_saved_step=5)
    assert ask(run, "--code", "75", "--signal", "USR1") == 75
    assert "shardvit: pretrain: not finished (signal USR1): requeued, it resumes from step 5" in capsys.readouterr().err
    assert ask(run, "--code", "1") == 75
    assert [(end.kind, end.last_saved_step) for end in read_ends(run / "slurm", "pretrain")] == [
        ("stopped", 5),
        ("failed", 5),
    ]
    assert ask(run, "--code", "1") == 1
    folder.update("pretrain", state="done")
    assert ask(run, "--code", "0") == 0
    assert len(read_ends(run / "slurm", "pretrain")) == 3


def test_a_cancelled_job_is_known_by_its_number(tmp_path: Path):
    run = tmp_path / "law"
    write_cancelled(run / "slurm", {"6"})
    assert ask(run, "--code", "75") == 75
    write_cancelled(run / "slurm", {"6", "7"})
    assert ask(run, "--code", "75") == 1


def test_a_damaged_record_is_for_somebody_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "law"
    (run / "slurm").mkdir(parents=True)
    (run / "slurm" / "pretrain.ends.json").write_text("[{")
    assert ask(run, "--code", "75") == 2
    assert "pretrain.ends.json is damaged" in capsys.readouterr().err
