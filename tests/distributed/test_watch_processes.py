"""Real processes that die, hang, are stopped or are disturbed: who is named, who ends, and what must change nothing.

The time that the watches go by is the test's, and passes only when every rank has had its share: a machine that lets
one of them wait for seconds makes it no hanging one. The single process has the real clock.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

from shardvit.pipeline.ranks.heartbeat import read_heartbeat

WORKER = Path(__file__).with_name("watch_worker.py")
HANG_SECONDS = 0.5  # of the watches' clock; powers of two add up without rounding
PATIENT = 240.0  # for a rank that is to be killed: it must not leave by itself before


class Ranks:
    """Some processes of watch_worker.py."""

    def __init__(
        self,
        folder: Path,
        *,
        world_size: int,
        faults: dict[int, str],
        hang_seconds: float,
        follow_seconds: float,
        real_time: bool,
    ) -> None:
        self.folder = folder
        self.outputs = [folder / f"output-{rank}" for rank in range(world_size)]
        self.everyone = tuple(range(world_size))
        self.processes = []
        self._piece = (hang_seconds or 16) / 8  # in which each rank writes a heartbeat
        self._now, self._real_time = 0.0, real_time
        self._set_clock()
        for rank, path in enumerate(self.outputs):
            numbers = [rank, world_size, hang_seconds, follow_seconds]
            with path.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", str(WORKER), folder, *map(str, numbers), faults.get(rank, "none")],
                        env={**os.environ, "PYTHONPATH": str(WORKER.parents[2])},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def _set_clock(self) -> None:
        if not self._real_time:
            beside = self.folder / "clock.new"
            beside.write_text(str(self._now))
            beside.rename(self.folder / "clock")

    def _count(self, what: str, rank: int) -> int:
        try:
            return int((self.folder / f"{what}-{rank}").read_text())
        except OSError:
            return -1

    def step(self, rank: int) -> int:
        return self._count("step", rank)

    def _goals(self, what: str, ranks: Collection[int], *, more: int) -> dict[int, int]:
        return {rank: self._count(what, rank) + more for rank in ranks}

    def _reach(self, what: str, goals: dict[int, int]) -> None:
        """Wait until each rank has counted so far, or is dead: then the test finds out by its exit code."""
        wait_for(
            lambda: all(
                self._count(what, rank) >= goal or self.processes[rank].poll() is not None
                for rank, goal in goals.items()
            ),
            self,
        )

    def jump(self, seconds: float) -> None:
        """Let so much time pass at once."""
        self._now += seconds
        self._set_clock()

    def settle(self, *, silent: Collection[int] = ()) -> None:
        """Wait until all watches but those of `silent` have acted upon the time: who asks again is done with it."""
        self._reach("ticks", self._goals("ticks", [rank for rank in self.everyone if rank not in silent], more=2))

    def pass_piece(self, *, going: Collection[int] = (), silent: Collection[int] = ()) -> None:
        """Let an eighth of a hang pass: until the main threads of `going` have beaten, and the watches have settled."""
        if self._real_time:
            time.sleep(0.02)
            return
        beats = self._goals("beats", going, more=1)
        self.jump(self._piece)
        self._reach("beats", beats)
        self.settle(silent=silent)

    def pass_hangs(self, number: int, **who: Collection[int]) -> None:
        """Let so many times the time pass that a hang may last; `who` as for `pass_piece`."""
        for _ in range(8 * number):
            self.pass_piece(**who)

    def advance(self, steps: int = 20) -> None:
        """Wait until every rank has done so many more steps."""
        self._reach("step", self._goals("step", self.everyone, more=steps))

    def begin_fault(self, rank: int) -> None:
        (self.folder / f"go-{rank}").touch()
        wait_for((self.folder / f"in-fault-{rank}").exists, self)

    def freeze(self, *ranks: int) -> None:
        """Stop them, and see that they are."""
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGSTOP)
        processes = [psutil.Process(self.processes[rank].pid) for rank in ranks]
        wait_for(lambda: all(process.status() == psutil.STATUS_STOPPED for process in processes), self)

    def hang(self, rank: int, *, speaker: int, silent: Collection[int] = ()) -> tuple[int, str]:
        """Let time pass, with all others waiting for `rank`, until the speaker has ended; its exit code and output."""
        others = [other for other in self.everyone if other != rank]
        wait_for(lambda: all(self.step(other) > self.step(rank) for other in others), self)
        deadline = time.monotonic() + 240
        while self.processes[speaker].poll() is None:
            assert time.monotonic() < deadline, [path.read_text() for path in self.outputs]
            self.pass_piece(silent=silent)
        return self.finish(speaker)

    def finish(self, rank: int) -> tuple[int, str]:
        code = self.processes[rank].wait(timeout=240)
        return code, self.outputs[rank].read_text()

    def stop(self) -> list[tuple[int, str]]:
        """An orderly end of all; exit codes and output."""
        (self.folder / "stop").touch()
        return [self.finish(rank) for rank in self.everyone]

    def heartbeat(self, rank: int) -> dict:
        """The rank's last one, as soon as there is one that is whole."""
        wait_for(lambda: read_heartbeat(self.folder / "ranks", rank) is not None, self)
        beat = read_heartbeat(self.folder / "ranks", rank)
        return self.heartbeat(rank) if beat is None else vars(beat)

    def stack(self, rank: int) -> str:
        return (self.folder / "ranks" / f"stack-rank-{rank}.txt").read_text()


def wait_for(condition, ranks: Ranks) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, [path.read_text() for path in ranks.outputs]
        time.sleep(0.005)


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(
        *,
        hang_seconds: float = HANG_SECONDS,
        world_size: int = 2,
        follow_seconds: float = 0.0,
        real_time: bool = False,
        **faults: str,
    ) -> Ranks:
        ranks = Ranks(
            tmp_path,
            world_size=world_size,
            faults={int(name.removeprefix("rank_")): fault for name, fault in faults.items()},
            hang_seconds=hang_seconds,
            follow_seconds=follow_seconds,
            real_time=real_time,
        )
        started.append(ranks)
        deadline = time.monotonic() + 240
        while not all(ranks.heartbeat(rank)["step"] > 0 for rank in ranks.everyone):
            assert time.monotonic() < deadline, [path.read_text() for path in ranks.outputs]
            ranks.pass_piece(going=ranks.everyone)
        ranks.pass_piece(going=ranks.everyone)  # in which each reads what the others have written
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


def test_a_stopped_process_is_named_is_not_resumed_and_is_killed(start):
    ranks = start(follow_seconds=PATIENT)
    ranks.freeze(1)
    step = ranks.step(1)
    code, text = ranks.hang(1, speaker=0, silent=[1])
    assert code == 1
    assert "0 says: rank 1 (host " in text
    assert f"process {ranks.processes[1].pid}) hangs: it has made no progress for" in text
    assert "it is stopped by a signal" in text and "did not answer" not in text
    assert 0 < named_step(text) <= step + 1 and ranks.step(1) == step
    assert "in wait_for_the_others" in ranks.stack(0)
    assert not ranks.stack(1)
    assert ranks.finish(1)[0] == -signal.SIGKILL


def test_a_stopped_rank_0_is_named_by_the_next(start):
    ranks = start(follow_seconds=PATIENT)
    ranks.freeze(0)
    code, text = ranks.hang(0, speaker=1, silent=[0])
    assert code == 1
    assert "1 says: rank 0 (host " in text
    assert ranks.finish(0) == (-signal.SIGKILL, "")


@pytest.mark.parametrize(
    ("fault", "function", "sign"),
    [("loop", "loop_for_ever", "(engine.hang_seconds)"), ("c-call", "sleep_with_the_lock", "its heartbeat is stale")],
)
def test_a_hanging_process_is_named_with_the_function_it_hangs_in_and_killed(start, fault, function, sign):
    ranks = start(rank_1=fault, follow_seconds=PATIENT)
    ranks.begin_fault(1)
    code, text = ranks.hang(1, speaker=0, silent=[1] if fault == "c-call" else [])
    assert code == 1
    assert "0 says: rank 1 (host " in text
    assert sign in text
    assert fault == "c-call" or "while forward" in text  # its last heartbeat may be from a little before
    assert f"in {function}" in text
    assert f"in {function}" in ranks.stack(1)
    assert text.count("says") == 1
    assert ranks.finish(1) == (-signal.SIGKILL, "")


def test_rank_0_in_an_endless_loop_names_itself(start):
    ranks = start(rank_0="loop")
    ranks.begin_fault(0)
    code, text = ranks.hang(0, speaker=0)
    assert code == 1
    assert "0 says: rank 0 (host " in text
    assert "in loop_for_ever" in text
    assert "it is computing" not in text or "loop_for_ever" in text
    assert ranks.finish(1) == (1, "")


def test_a_single_process_in_an_endless_loop_ends(start):
    ranks = start(world_size=1, rank_0="loop", hang_seconds=3.0, real_time=True)
    ranks.begin_fault(0)
    code, text = ranks.finish(0)
    assert code == 1
    assert "in loop_for_ever" in text


def test_a_long_phase_that_beats_is_no_hang(start):
    ranks = start(rank_1="slow")  # twice as long as a hang may be
    ranks.begin_fault(1)
    ranks.pass_hangs(2, going=[1])
    ranks.advance()
    assert ranks.stop() == [(0, ""), (0, "")]


def test_a_clock_that_jumps_by_a_day_changes_nothing(start):
    ranks = start(rank_0="clock", rank_1="clock")
    ranks.begin_fault(0)
    ranks.begin_fault(1)
    sequence = ranks.heartbeat(0)["sequence"]
    ranks.pass_hangs(2, going=ranks.everyone)
    assert ranks.heartbeat(0)["sequence"] >= sequence + 16
    ranks.advance()
    assert ranks.stop() == [(0, ""), (0, "")]


def test_all_processes_stopped_for_longer_than_a_hang_and_continued_go_on(start):
    ranks = start()
    ranks.freeze(*ranks.everyone)
    ranks.jump(2 * HANG_SECONDS)
    for process in ranks.processes:
        process.send_signal(signal.SIGCONT)
    ranks.settle()
    ranks.pass_hangs(1, going=ranks.everyone)
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
    for _ in range(3):
        ranks.pass_piece()
    assert ranks.heartbeat(0)["sequence"] > sequence + 2
    assert ranks.processes[0].poll() is None
    assert ranks.outputs[0].read_text() == ""


def test_a_rank_that_failed_is_named_by_those_that_wait_for_it(start):
    ranks = start(rank_1="raise")
    ranks.begin_fault(1)
    code, text = ranks.finish(1)
    assert code == 1
    assert "ValueError: no such thing" in text
    code, text = ranks.hang(1, speaker=0)
    assert code == 1
    assert "has failed (ValueError: no such thing); its last known step was" in text
    assert not psutil.pid_exists(ranks.processes[1].pid)
