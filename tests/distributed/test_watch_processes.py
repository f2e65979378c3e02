"""Real processes that die, hang, are stopped or are disturbed: who is named, who ends, and what must change nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.heartbeat import read_heartbeat

WORKER = Path(__file__).with_name("watch_worker.py")
HANG_SECONDS = 3.0


class Ranks:
    """Some processes of watch_worker.py."""

    def __init__(self, folder: Path, *, world_size: int = 2, faults: dict[int, str], hang_seconds: float) -> None:
        self.folder = folder
        self.outputs = [folder / f"output-{rank}" for rank in range(world_size)]
        self.processes = []
        for rank, path in enumerate(self.outputs):
            arguments = [str(folder), str(rank), str(world_size), str(hang_seconds), faults.get(rank, "none")]
            with path.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", str(WORKER), *arguments],
                        env={**os.environ, "PYTHONPATH": str(WORKER.parents[2])},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def step(self, rank: int) -> int:
        try:
            return int((self.folder / f"step-{rank}").read_text())
        except OSError:
            return -1

    def advance(self, steps: int = 20) -> None:
        """Wait until every rank has done so many more steps."""
        goals = [self.step(rank) + steps for rank in range(len(self.processes))]
        wait_for(lambda: all(self.step(rank) >= goal for rank, goal in enumerate(goals)), self)

    def begin_fault(self, rank: int) -> None:
        (self.folder / f"go-{rank}").touch()

    def finish(self, rank: int) -> tuple[int, str]:
        code = self.processes[rank].wait(timeout=240)
        return code, self.outputs[rank].read_text()

    def stop(self) -> list[tuple[int, str]]:
        """An orderly end of all; exit codes and output."""
        beside = self.folder / "stop.new"
        beside.write_text(str(self.step(0) + 100))  # the ranks are at most one step apart
        beside.rename(self.folder / "stop")
        return [self.finish(rank) for rank in range(len(self.processes))]

    def heartbeat(self, rank: int) -> dict:
        beat = read_heartbeat(self.folder / "ranks", rank)
        return {"step": -1} if beat is None else vars(beat)

    def stack(self, rank: int) -> str:
        return (self.folder / "ranks" / f"stack-rank-{rank}.txt").read_text()


def wait_for(condition, ranks: Ranks) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, [path.read_text() for path in ranks.outputs]
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(*, hang_seconds: float = HANG_SECONDS, world_size: int = 2, **faults: str) -> Ranks:
        ranks = Ranks(
            tmp_path,
            world_size=world_size,
            faults={int(name.removeprefix("rank_")): fault for name, fault in faults.items()},
            hang_seconds=hang_seconds,
        )
        started.append(ranks)
        wait_for(lambda: all(ranks.heartbeat(rank)["step"] > 0 for rank in range(world_size)), ranks)
        return ranks

    yield begin
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.wait()


def named_step(text: str) -> int:
    return int(text.partition("its last known step was ")[2].partition(",")[0])


@pytest.mark.parametrize("hang_seconds", [HANG_SECONDS, 0])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_once_and_the_others_end(start, victim, hang_seconds):
    ranks = start(world_size=3, hang_seconds=hang_seconds)
    before = ranks.heartbeat(victim)["step"]
    ranks.processes[victim].kill()
    ranks.processes[victim].wait()
    others = [rank for rank in range(3) if rank != victim]
    ends = [ranks.finish(rank) for rank in others]
    assert [code for code, _ in ends] == [1, 1]
    speaker = ends[0][1]
    assert f"{others[0]} says: rank {victim} (host {os.uname().nodename}, process " in speaker
    assert f"process {ranks.processes[victim].pid}) is gone; its last known step was" in speaker
    assert before <= named_step(speaker) <= ranks.step(victim) + 1
    assert speaker.count("says") == 1
    assert "says" not in ends[1][1]


def test_a_stopped_process_is_named_shows_its_stack_and_is_killed(start):
    ranks = start()
    ranks.processes[1].send_signal(signal.SIGSTOP)
    code, text = ranks.finish(0)
    assert code == 1
    assert "0 says: rank 1 (host " in text
    assert f"process {ranks.processes[1].pid}) hangs: it has not been heard of for" in text
    assert "it is stopped by a signal" in text
    assert 0 < named_step(text) <= ranks.step(1) + 1
    assert " in <module>" in text.partition("stack-rank-1.txt):")[2]
    assert "watch_worker.py" in ranks.stack(1)
    assert "in wait_for_the_others" in ranks.stack(0)
    assert ranks.finish(1)[0] == -signal.SIGKILL


def test_a_stopped_rank_0_is_named_by_the_next(start):
    ranks = start()
    ranks.processes[0].send_signal(signal.SIGSTOP)
    code, text = ranks.finish(1)
    assert code == 1
    assert "1 says: rank 0 (host " in text
    assert ranks.finish(0) == (-signal.SIGKILL, "")


@pytest.mark.parametrize(
    ("fault", "function", "sign"),
    [("loop", "loop_for_ever", "has got no further"), ("c-call", "sleep_with_the_lock", "has not been heard of")],
)
def test_a_hanging_process_is_named_with_the_function_it_hangs_in_and_killed(start, fault, function, sign):
    ranks = start(rank_1=fault)
    ranks.begin_fault(1)
    code, text = ranks.finish(0)
    assert code == 1
    assert "0 says: rank 1 (host " in text
    assert sign in text
    assert fault == "c-call" or "while forward" in text  # its heartbeat may be from a little before
    assert f"in {function}" in text
    assert f"in {function}" in ranks.stack(1)
    assert text.count("says") == 1
    assert ranks.finish(1) == (-signal.SIGKILL, "")


def test_rank_0_in_an_endless_loop_names_itself(start):
    ranks = start(rank_0="loop")
    ranks.begin_fault(0)
    code, text = ranks.finish(0)
    assert code == 1
    assert "0 says: rank 0 (host " in text
    assert "in loop_for_ever" in text
    assert "it is computing" not in text or "loop_for_ever" in text
    assert ranks.finish(1) == (1, "")


def test_a_single_process_in_an_endless_loop_ends(start):
    ranks = start(world_size=1, rank_0="loop")
    ranks.begin_fault(0)
    code, text = ranks.finish(0)
    assert code == 1
    assert "in loop_for_ever" in text


def test_a_long_phase_that_beats_is_no_hang(start):
    ranks = start(rank_1="slow")  # twice as long as a hang may be
    ranks.begin_fault(1)
    ranks.advance()
    assert ranks.stop() == [(0, ""), (0, "")]


def test_a_clock_that_jumps_by_a_day_changes_nothing(start):
    ranks = start(rank_0="clock", rank_1="clock")
    ranks.begin_fault(0)
    ranks.begin_fault(1)
    sequence = ranks.heartbeat(0)["sequence"]
    wait_for(lambda: ranks.heartbeat(0)["sequence"] > sequence + 16, ranks)  # two times as long as a hang may be
    ranks.advance()
    assert ranks.stop() == [(0, ""), (0, "")]


def test_all_processes_stopped_for_longer_than_a_hang_and_continued_go_on(start):
    ranks = start()
    for process in ranks.processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(2 * HANG_SECONDS)
    for process in ranks.processes:
        process.send_signal(signal.SIGCONT)
    ranks.advance()
    assert ranks.stop() == [(0, ""), (0, "")]


def test_a_stack_by_hand_disturbs_nothing(start):
    ranks = start()
    ranks.processes[1].send_signal(signal.SIGUSR2)
    wait_for(lambda: "in <module>" in ranks.stack(1), ranks)
    ranks.advance()
    assert ranks.stop() == [(0, ""), (0, "")]
    assert not (ranks.folder / "ranks" / "stack-rank-0.txt").exists()  # nothing was dumped there
    assert ranks.heartbeat(1)["state"] == "left"


def test_a_rank_that_leaves_in_good_order_is_no_cause_of_alarm(start):
    ranks = start(rank_1="leave", hang_seconds=0)
    ranks.begin_fault(1)
    assert ranks.finish(1) == (0, "")
    sequence = ranks.heartbeat(0)["sequence"]
    wait_for(lambda: ranks.heartbeat(0)["sequence"] > sequence + 2, ranks)
    assert ranks.processes[0].poll() is None
    assert ranks.outputs[0].read_text() == ""


def test_a_rank_that_failed_is_named_by_those_that_wait_for_it(start):
    ranks = start(rank_1="raise")
    ranks.begin_fault(1)
    code, text = ranks.finish(1)
    assert code == 1
    assert "ValueError: no such thing" in text
    code, text = ranks.finish(0)
    assert code == 1
    assert "has failed (ValueError: no such thing); its last known step was" in text
    assert not psutil.pid_exists(ranks.processes[1].pid)
