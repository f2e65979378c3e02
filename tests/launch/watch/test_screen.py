"""The page of `shardvit watch`: what it says of a run, whatever state the run, its processes and its files are in."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardvit.data_shards.errors import UserError
from shardvit.launch.slurm.commands import Queued
from shardvit.launch.slurm.records import End, Submission, write_ends, write_submission
from shardvit.launch.watch.look import Watcher, last_lines
from shardvit.launch.watch.screen import page
from shardvit.pipeline.ranks.heartbeat import Heartbeat, heartbeat_file, write_heartbeat
from shardvit.pipeline.ranks.process import process_started, this_machine
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs.logs import EventsLog, MetricsLog
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.launch.slurm.fake_slurm import FakeSlurm

NOW = 1_760_000_000.0


class Run:
    """A run whose pretrain stands at step 400 of 800, ten steps a second."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(runs_root=root, name="digits")
        self.folder.open(load_recipe("digits"))
        self.folder.update("pretrain", state="running", last_saved_step=350, total_steps=800)
        (self.folder.checkpoints("pretrain") / "step-00000350").mkdir(parents=True)
        self.stage = self.folder.stage("pretrain")
        self.log(range(50, 401, 50))
        with EventsLog(self.stage / "events.jsonl") as events:
            events.append("start", "from step 0, 2 processes on 1 host", step=0, images_seen=0)
            events.append("checkpoint", "step 350 is saved", step=350, images_seen=350 * 64)

    def log(self, steps: range, *, resume_step: int = -1, **more: float) -> None:
        path = self.stage / "metrics.jsonl"
        with MetricsLog(path, resume_step=resume_step):
            pass
        with path.open("a") as file:
            for step in steps:
                metrics = {
                    "train/loss": 2.0 - step / 400,
                    "train/top1": step / 800,
                    "opt/lr": 1e-3,
                    "perf/images_per_s": 1234.5,
                    "perf/step_seconds_p50": 0.1,
                    "perf/step_seconds_p95": 0.2,
                    "perf/step_seconds_max": 61.0,
                    "perf/gpu_hours": 1.5,
                    **more,
                }
                row = {"step": step, "images_seen": step * 64, "time": 1000.0 + step / 10, "metrics": metrics}
                file.write(json.dumps(row) + "\n")

    def beat(self, rank: int, **changes: Any) -> None:
        beat = Heartbeat(
            **{
                "rank": rank,
                "attempt": "1 1",
                "host": "here",
                "machine": this_machine(),
                "pid": os.getpid(),
                "started": process_started(os.getpid()),
                "main_thread": 1,
                "sequence": 1,
                "step": 400,
                "turn": 1,
                "status": "the forward pass",
                "idle_seconds": 0.0,
                "waiting": False,
            }
            | changes
        )
        (self.stage / "ranks").mkdir(exist_ok=True)
        write_heartbeat(self.stage / "ranks", beat)

    def watcher(self, **slurm: Any) -> Watcher:
        return Watcher(self.folder.path, slurm=FakeSlurm(**slurm))

    def text(self, watcher: Watcher | None = None, *, width: int = 80, height: int | None = None) -> str:
        return rendered(watcher or self.watcher(), width=width, height=height)


def rendered(watcher: Watcher, *, width: int = 80, height: int | None = None, glyphs: Any = "braille") -> str:
    console = Console(width=width, color_system=None, force_terminal=False, markup=False, emoji=False, highlight=False)
    view = watcher.look(queue="wait for it")
    with console.capture() as captured:
        console.print(page(view, width=width, height=height, glyphs=glyphs, now=NOW))
    return captured.get()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_running_stage_is_shown_with_its_numbers(run: Run) -> None:
    for rank in range(2):
        run.beat(rank)
    text = run.text()
    row = next(line for line in text.splitlines() if line.startswith("pretrain "))
    assert row.split()[1] == "running" and "50.0%" in row and "400 of 800" in row and row.endswith("40.0 s")
    assert [line.split()[:2] for line in text.splitlines() if line.startswith(("swap_head", "finetune"))] == [
        ["swap_head", "waits"],
        ["finetune", "waits"],
    ]
    for part in ("loss 1.0000", "top1 0.5000", "1,234.5 images/s", "100 ms", "1:01 min", "1.50 gpu-hours"):
        assert part in text
    assert "step 350, " in text and "2 of 2 processes run, after step 400: forward pass" in text
    assert "train/loss 1.0000" in text and "checkpoint    step 350 is saved" in text
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text


def test_a_held_out_score_takes_the_place_of_the_training_batchs(run: Run) -> None:
    assert run.watcher().look().stages[0].score[0] == "train/top1"
    run.log(range(450, 451), resume_step=400, **{"val/top1": 0.75})
    assert run.watcher().look().stages[0].score[0] == "train/top1"  # one point is no curve
    run.log(range(500, 501), resume_step=450, **{"val/top1": 0.5})
    view = run.watcher().look().stages[0]
    assert view.score == ("val/top1", [(450, 0.75), (500, 0.5)])


def test_ranks_in_trouble_are_named(run: Run) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    run.beat(0)
    run.beat(1, pid=gone.pid, started=1.0, step=377)
    run.beat(2, host="far", machine="another", pid=77)
    run.beat(3, state="failed", note="ValueError: no")
    run.beat(4, idle_seconds=500.0, status="reading a batch")
    old = time.time() - 1000
    os.utime(heartbeat_file(run.stage / "ranks", 2), (old, old))
    text = run.text(width=100)
    assert "2 of 5 processes run" in text
    lines = {line.split(" (")[0].strip(): line for line in text.splitlines() if line.startswith("  rank ")}
    assert lines.keys() == {"rank 1", "rank 2", "rank 3", "rank 4"}
    assert "is dead, after step 377" in lines["rank 1"] and "no sign of life for 16:" in lines["rank 2"]
    assert "(host far, process 77)" in lines["rank 2"] and "failed" in lines["rank 3"] and "ValueError: no" in text
    assert "no progress for 8:20 min, in reading a batch" in lines["rank 4"]


def test_a_heartbeat_that_goes_on_is_alive_however_old_its_files_time_is(run: Run) -> None:
    """A file server's clock may be another one's."""
    run.beat(0, machine="another")
    watcher, old = run.watcher(), time.time() - 1000
    os.utime(heartbeat_file(run.stage / "ranks", 0), (old, old))
    assert watcher.look().stages[0].ranks[0].state == "silent"
    run.beat(0, machine="another", sequence=2)
    os.utime(heartbeat_file(run.stage / "ranks", 0), (old, old))
    assert watcher.look().stages[0].ranks[0].state == "runs"


def test_ranks_of_an_earlier_attempt_are_not_counted(run: Run) -> None:
    run.beat(0, attempt="2 2")
    run.beat(1, attempt="1 1", state="failed")
    assert [rank.state for rank in run.watcher().look().stages[0].ranks] == ["runs"]


@pytest.mark.parametrize(
    ("kind", "state"), [("stopped", "stopped"), ("failed", "failed"), (None, "interrupted"), ("done", "done")]
)
def test_a_stage_whose_processes_are_gone_says_how_it_ended(run: Run, kind: Any, state: str) -> None:
    run.beat(0, state="left" if kind else "running", started=1.0)
    if kind:
        with EventsLog(run.stage / "events.jsonl") as events:
            events.append(kind, "by SIGTERM", step=400, images_seen=0)
    if kind == "done":
        run.folder.update("pretrain", state="done")
    view = run.watcher().look()
    assert view.stages[0].state == state
    with EventsLog(run.stage / "events.jsonl") as events:
        events.append("start", "again", step=400, images_seen=0)
    assert run.watcher().look().stages[0].on_disk.restarts == 1


def test_a_run_on_slurm_shows_its_job_its_limit_and_its_log(run: Run) -> None:
    run.beat(0)
    submission = Submission(
        time=0, processes=2, limit_seconds=10, max_restarts=1, jobs={"pretrain": "7", "swap_head": "8"}
    )
    write_submission(run.folder.path / "slurm", submission)
    log = run.folder.path / "slurm" / "pretrain.log"
    log.write_bytes(b"first\nbar 10%\rbar 20%\r\nlast \x1b[2Jline \xff\n\n")
    text = run.text(run.watcher(states={"7": Queued("RUNNING", left_seconds=15, nodes="node[1-2]")}))
    assert "SLURM job 7: RUNNING on node[1-2], 15.0 s until its time limit: 3 requeues left" in text
    assert text.splitlines()[-3:] == ["first", "bar 20%", "last \\x1b[2Jline \ufffd"]
    away = run.text(run.watcher(away=True))
    assert "the queue is unknown" in away and "400 of 800" in away


def test_every_stage_has_its_job_the_queues_word_and_how_it_ended(run: Run) -> None:
    run.beat(0)
    slurm = run.folder.path / "slurm"
    jobs: dict[str, str] = {"pretrain": "7", "swap_head": "8", "finetune": "9"}
    submission = Submission(
        time=0, processes=2, limit_seconds=3600, max_restarts=1, jobs=jobs, total_steps={"finetune": 50}
    )
    write_submission(slurm, submission)
    end = End(job="7", time=0, kind="stopped", code=75, last_saved_step=350, sentence="not finished: requeued")
    write_ends(slurm, "pretrain", [end])
    queue = {"7": Queued("RUNNING", left_seconds=15, nodes="node1"), "8": Queued("PENDING", "Dependency")}
    watcher = run.watcher(states=queue, old={"9": "CANCELLED"})
    text = run.text(watcher)
    for part in ("0 of 50", "swap_head: SLURM job 8: PENDING (Dependency)", "finetune: SLURM job 9: CANCELLED"):
        assert part in text, text
    pretrain, swap_head, finetune = (stage.as_tree() for stage in watcher.look().stages)
    assert json.loads(json.dumps(pretrain)) == pretrain and pretrain["last_end"] == "not finished: requeued"
    assert (pretrain["step"], pretrain["total_steps"], pretrain["saved_step"]) == (400, 800, 350)
    assert (pretrain["job"], pretrain["left_seconds"], pretrain["requeues_needed"]) == ("7", 15, 1)
    assert (swap_head["queue"], swap_head["total_steps"], finetune["queue"]) == ("PENDING", None, "CANCELLED")


@pytest.mark.parametrize(("left", "limit", "needed"), [(40, 10, 0), (39, 10, 1), (15, 10, 3), (0, 60, 1)])
def test_how_often_it_will_be_requeued(run: Run, left: int, limit: int, needed: int) -> None:
    run.beat(0)
    submission = Submission(time=0, processes=2, limit_seconds=limit, max_restarts=1, jobs={"pretrain": "7"})
    write_submission(run.folder.path / "slurm", submission)
    watcher = run.watcher(states={"7": Queued("RUNNING", left_seconds=left)})
    assert watcher.look(queue="wait for it").stages[0].requeues == needed


def test_a_submitted_run_that_has_not_begun_is_shown(run: Run) -> None:
    slurm = run.folder.path / "slurm"
    slurm.mkdir()
    (run.folder.path / "recipe.yaml").rename(slurm / "recipe.yaml")
    (run.stage / "stage.json").unlink()
    for file in ("metrics.jsonl", "events.jsonl"):
        (run.stage / file).unlink()
    submission = Submission(
        time=0, processes=2, limit_seconds=10, max_restarts=1, jobs={"pretrain": "7"}, total_steps={"pretrain": 800}
    )
    write_submission(slurm, submission)
    text = run.text(run.watcher(states={"7": Queued("PENDING", "Priority")}))
    assert "0 of 800" in text and "SLURM job 7: PENDING (Priority)" in text


def test_hostile_and_damaged_files_are_shown_as_text_as_far_as_they_go(run: Run) -> None:
    evil = "\x1b[31m[red]<b>$x$\u202e\nnext"
    run.beat(0, host=evil, status=evil)
    run.beat(1, state="failed", note=evil)
    (run.stage / "ranks" / "rank-2.json").write_text('{"rank": 2}')
    (run.stage / "ranks" / "rank-3.json").write_text(
        json.dumps({**json.loads((run.stage / "ranks" / "rank-1.json").read_text()), "rank": 3, "step": "many"})
    )
    with EventsLog(run.stage / "events.jsonl") as events:
        events.append("note", evil, step=1, images_seen=8)
    for file in ("metrics.jsonl", "events.jsonl"):
        with (run.stage / file).open("ab") as stream:
            stream.write(b'\xff\xfe{"step": \n[]\n' + b"[" * 99_999 + b"\n" + b'{"step": 1')
    (run.stage / "stage.json").write_text("{")
    (run.folder.path / "slurm").mkdir()
    (run.folder.path / "slurm" / "jobs.json").write_text("[]")
    text = run.text(width=200)
    assert "\x1b" not in text and "\u202e" not in text
    assert "\\x1b[31m[red]<b>$x$\\u202e\\nnext" in text
    assert "loss 1.0000" in text and "stage.json is broken" in text and "jobs.json is damaged" in text
    (run.folder.path / "recipe.yaml").write_text("a: [")
    assert "loss 1.0000" in run.text()


def test_a_low_or_narrow_terminal_gets_what_matters_most(run: Run) -> None:
    run.beat(0)
    for height in (3, 12, 18, 24, 40):
        lines = run.text(height=height).splitlines()
        assert "pretrain" in "".join(lines[:4])
        assert len(lines) <= max(height, 12)  # no less than the facts
    assert "step 350 is saved" in run.text(height=40) and "step 350 is saved" not in run.text(height=12)
    assert max(map(len, run.text(width=40).splitlines())) <= 40
    for width in (40, 80):  # the path of the run is cut to it
        assert rendered(run.watcher(), width=width, glyphs="ascii").isascii()


def test_what_is_no_run_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run"):
        Watcher(tmp_path, slurm=FakeSlurm())
    (run.folder.path / "sweep.json").touch()
    with pytest.raises(UserError, match="is a sweep"):
        run.watcher()


def test_the_end_of_a_long_log_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(path, most=2) == ("line 99998", "line 99999")
    assert last_lines(tmp_path / "none") == () == last_lines(tmp_path)
