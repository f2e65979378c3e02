"""What SLURM's commands say, understood; what they refuse, in one sentence."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.commands import Queued, Slurm, parse_queue, submit_command


def test_the_queue_is_read():
    text = "12|RUNNING|None|1-00:10:05|node[1-2]\n13|PENDING|Dependency|1:00|\n14|TIMEOUT|TimeLimit|0:00|node1\n"
    assert parse_queue(text) == {
        "12": Queued("RUNNING", "", 87_005, "node[1-2]"),
        "13": Queued("PENDING", "Dependency"),
        "14": Queued("TIMEOUT", "TimeLimit", None, "node1"),
    }
    assert [queued.is_finished for queued in parse_queue(text).values()] == [False, False, True]


def test_an_array_is_as_alive_as_its_most_alive_task():
    array = "12_0|COMPLETED|None|0:00|\n12_1|RUNNING|None|9:00|n1\n12_2|PENDING|JobArrayTaskLimit|10:00|\n"
    text = f"{array}13_0|FAILED|None|0:00|\n"
    found = parse_queue(text)
    assert {job: queued.state for job, queued in found.items()} == {
        **{"12_0": "COMPLETED", "12_1": "RUNNING", "12_2": "PENDING", "12": "RUNNING"},
        **{"13_0": "FAILED", "13": "FAILED"},
    }


def test_what_is_submitted_behind_another_job_is_removed_with_it():
    assert submit_command(Path("a b"), after=None) == ["sbatch", "--parsable", "a b"]
    assert submit_command(Path("a"), after="7")[2:4] == ["--dependency=afterok:7", "--kill-on-invalid-dep=yes"]


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_the_commands_are_called(programs: Path):
    program(programs, "sbatch", 'echo "$@" >> said; echo "17;cluster"')
    program(programs, "scancel", 'echo "$@" >> said')
    program(programs, "squeue", "echo '17|PENDING|Priority|1:00|'")
    program(programs, "sacct", "printf '16|CANCELLED by 0\\n15|COMPLETED\\n'")
    for name in ("sbatch", "scancel"):
        (programs / name).write_text((programs / name).read_text().replace(">> said", f">> {programs}/said"))
    slurm = Slurm()
    assert slurm.submit(Path("x.sbatch"), after=None) == "17"
    slurm.cancel_waiting("17")
    slurm.signal("17")
    slurm.cancel(["17", "18"])
    assert (programs / "said").read_text().splitlines() == [
        "--parsable x.sbatch",
        "--state=PENDING 17",
        "--signal=USR1 --batch 17",
        "17 18",
    ]
    assert slurm.queue(["17"]) == {"17": Queued("PENDING", "Priority")}
    assert slurm.history(["15", "16"]) == {"16": "CANCELLED", "15": "COMPLETED"}
    assert slurm.queue([]) == {} and slurm.history([]) == {}


def test_a_refusal_is_one_sentence(programs: Path):
    program(programs, "sbatch", "echo 'sbatch: error: Invalid account\nsbatch: error: failed' >&2; exit 1")
    with pytest.raises(UserError) as caught:
        Slurm().submit(Path("x"), after=None)
    assert str(caught.value) == "sbatch --parsable x: sbatch: error: Invalid account; sbatch: error: failed"


def test_jobs_that_slurm_has_forgotten_are_none(programs: Path):
    program(programs, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    program(programs, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert Slurm().queue(["17"]) == {} and Slurm().history(["17"]) == {}
    program(programs, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match="Unable to contact"):
        Slurm().queue(["17"])


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not on this machine"):
        Slurm().submit(Path("x"), after=None)
