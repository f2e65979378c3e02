"""Heartbeats, the judgement upon them, stacks and sentences. Real faults are in tests/distributed."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest

from shardvit.pipeline.ranks import dead_ranks as gone_module
from shardvit.pipeline.ranks import watch as watch_module
from shardvit.pipeline.ranks.dead_ranks import peer_is_gone, report_gone
from shardvit.pipeline.ranks.heartbeat import (
    Heartbeat,
    Sightings,
    WakingClock,
    find_suspects,
    heartbeat_file,
    read_heartbeat,
    write_heartbeat,
)
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.process import process_started, this_machine
from shardvit.pipeline.ranks.watch import Watch


def make_beat(rank: int, **changes) -> Heartbeat:
    """Of this very process, so that it is alive."""
    beat = Heartbeat(
        rank=rank,
        attempt="one",
        host="h",
        machine=this_machine(),
        pid=os.getpid(),
        started=process_started(os.getpid()),
        main_thread=threading.main_thread().ident,
        sequence=1,
        step=412,
        turn=0,
        status="forward",
        idle_seconds=0.0,
        waiting=False,
    )
    return replace(beat, **changes)


@pytest.fixture
def dead():
    """Number and start of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(process.pid)
    process.stdin.close()
    process.wait()
    return {"pid": process.pid, "started": started}


@pytest.fixture(autouse=True)
def first_word(monkeypatch):
    lock = threading.Lock()
    monkeypatch.setattr(gone_module, "first_word", lock)
    monkeypatch.setattr(watch_module, "first_word", lock)


@pytest.fixture(autouse=True)
def signal_as_before():
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


# Heartbeats


def test_a_heartbeat_is_read_as_it_was_written_and_its_file_never_changes_its_size(tmp_path):
    for beat in (make_beat(3), make_beat(3, note="\U0001f4a5" * 10_000, status="\U0001f4a5" * 500)):
        write_heartbeat(tmp_path, beat)
        kept = replace(beat, note=beat.note[:240], status=beat.status[:60])
        assert read_heartbeat(tmp_path, 3) == kept
        assert heartbeat_file(tmp_path, 3).stat().st_size == 4096
    write_heartbeat(tmp_path, make_beat(3))  # shorter than the one before
    assert read_heartbeat(tmp_path, 3) == make_beat(3)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"rank": 1}', "\x00" * 4096])
def test_a_torn_heartbeat_counts_as_none(tmp_path, content):
    heartbeat_file(tmp_path, 1).write_text(content)
    assert read_heartbeat(tmp_path, 1) is None
    assert read_heartbeat(tmp_path, 2) is None


def test_a_heartbeat_of_an_earlier_attempt_counts_as_none(tmp_path):
    write_heartbeat(tmp_path, make_beat(1, attempt="earlier"))
    assert read_heartbeat(tmp_path, 1, attempt="one") is None
    assert read_heartbeat(tmp_path, 1) is not None


def test_a_process_is_gone_when_it_is_dead_or_its_number_belongs_to_another(dead):
    assert not make_beat(0).is_gone
    assert make_beat(0, **dead).is_gone
    assert make_beat(0, started=-1.0).is_gone  # a reused number
    assert not make_beat(0, **dead, machine="another").is_gone


def test_a_dead_process_that_nobody_has_collected_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    beat = make_beat(0, pid=process.pid, started=process_started(process.pid))
    assert not beat.is_gone
    process.kill()
    deadline = time.monotonic() + 240
    while not beat.is_gone:
        assert time.monotonic() < deadline
    process.stdin.close()
    process.wait()


# Judgement


def test_the_clock_counts_no_time_in_which_its_owner_slept():
    readings = iter([100.0, 101.0, 101.5, 9_000.0, 9_001.0])
    clock = WakingClock(most_seconds=4, monotonic=lambda: next(readings))
    assert [clock.tick() for _ in range(4)] == [1.0, 1.5, 5.5, 6.5]


def suspects_of(*beats: Heartbeat, silent: dict[int, float] | None = None, ranks: int = 3, now: float = 1000.0):
    """Who is suspected of a hang of 100 s; the heartbeats have just changed, but for the silent ones."""
    sightings = Sightings()
    for beat in beats:
        sightings.note(beat, now=now - (silent or {}).get(beat.rank, 0.0))
    found = find_suspects(sightings, ranks=range(ranks), now=now, hang_seconds=100, slack_seconds=5)
    return [(suspect.rank, suspect.why) for suspect in found]


def stuck(rank: int, **changes) -> Heartbeat:
    return make_beat(rank, **{"idle_seconds": 100.0, "waiting": True, **changes})


def test_nobody_is_suspected_while_any_rank_goes_on():
    assert suspects_of(stuck(0), stuck(1, waiting=False, step=2), stuck(2, idle_seconds=94.0)) == []
    assert suspects_of(stuck(0), stuck(1), stuck(2, idle_seconds=10.0), silent={2: 80.0}) == []
    assert suspects_of(stuck(0), stuck(1, waiting=False), stuck(2, idle_seconds=96.0)) == [(1, "behind")]


def test_a_silent_rank_is_to_blame_before_all_that_answer():
    beats = stuck(0), stuck(1, step=500, idle_seconds=1.0), stuck(2, waiting=False, step=1)
    assert suspects_of(*beats, silent={1: 99.0}) == [(1, "silent")]


def test_a_rank_that_was_never_heard_of_is_to_blame():
    assert suspects_of(stuck(0), stuck(2)) == [(1, "silent")]


def test_a_rank_that_waits_for_nobody_is_to_blame():
    assert suspects_of(stuck(0, step=411), stuck(1, waiting=False), stuck(2)) == [(1, "behind")]


def test_among_equals_the_ones_that_have_got_least_far_are_to_blame():
    assert suspects_of(stuck(0), stuck(1, step=411, turn=3), stuck(2, step=411, turn=2)) == [(2, "behind")]
    assert suspects_of(stuck(0), stuck(1, step=411), stuck(2, step=411)) == [(1, "behind"), (2, "behind")]
    assert suspects_of(stuck(0, waiting=False), stuck(1, waiting=False, step=411), stuck(2)) == [(1, "behind")]


def test_a_rank_that_has_left_is_out_of_it():
    assert suspects_of(stuck(0), stuck(1, state="left", step=1), stuck(2), silent={1: 500.0}) == [
        (0, "behind"),
        (2, "behind"),
    ]


def test_a_rank_that_has_failed_is_to_blame_without_further_ado():
    assert suspects_of(stuck(0), make_beat(1, state="failed"), stuck(2), silent={2: 99.0}) == [(1, "failed")]


# Sentences


PLACE = Place(rank=0, world_size=3, local_rank=0, local_world_size=3)
NOBODY = "another process of the run died; which one is not known on this host"


def who_is_gone(folder, monkeypatch) -> str:
    """What rank 0 says, at once; its own heartbeat is as before afterwards."""
    said: list[str] = []
    before = read_heartbeat(folder, 0)
    with monkeypatch.context() as patch:
        patch.setattr(gone_module, "LEAVE_SECONDS", 0.0)
        patch.setattr(gone_module, "first_word", threading.Lock())
        report_gone(folder, place=PLACE, say=said.append)
    if before:
        write_heartbeat(folder, before)
    (folder / "news.json").unlink(missing_ok=True)
    (sentence,) = said
    return sentence


def test_the_rank_whose_process_is_dead_is_gone(tmp_path, dead, monkeypatch):
    write_heartbeat(tmp_path, make_beat(0))
    write_heartbeat(tmp_path, make_beat(1))
    assert who_is_gone(tmp_path, monkeypatch) == NOBODY
    write_heartbeat(tmp_path, make_beat(2, **dead))
    assert (
        who_is_gone(tmp_path, monkeypatch)
        == f"rank 2 (host h, process {dead['pid']}) is gone; its last known step was 412, while forward"
    )
    write_heartbeat(tmp_path, make_beat(2, **dead, state="left"))
    assert who_is_gone(tmp_path, monkeypatch) == NOBODY
    write_heartbeat(tmp_path, make_beat(2, **dead, attempt="earlier"))
    assert who_is_gone(tmp_path, monkeypatch) == NOBODY


def test_what_another_host_has_found_out_is_passed_on(tmp_path, dead, monkeypatch):
    write_heartbeat(tmp_path, make_beat(0))
    write_heartbeat(tmp_path, make_beat(1, machine="another", state="failed", note="OSError: no space"))
    assert "rank 1 (host h, process " in who_is_gone(tmp_path, monkeypatch)
    assert "has failed (OSError: no space)" in who_is_gone(tmp_path, monkeypatch)
    write_heartbeat(tmp_path, make_beat(2, machine="another", state="ended", note="rank 7 (host x) hangs"))
    assert who_is_gone(tmp_path, monkeypatch) == "rank 7 (host x) hangs"


def test_heartbeats_of_an_earlier_attempt_are_not_spoken_of(tmp_path, dead, monkeypatch):
    """A rank that fails before its watch begins finds its own earlier one's."""
    for rank in range(3):
        write_heartbeat(tmp_path, make_beat(rank, **dead))
    assert who_is_gone(tmp_path, monkeypatch) == NOBODY
    write_heartbeat(tmp_path, make_beat(0, machine="another"))
    assert who_is_gone(tmp_path, monkeypatch) == NOBODY


def test_the_lowest_rank_of_a_host_says_it_and_says_it_once(tmp_path, dead, monkeypatch):
    said = []
    write_heartbeat(tmp_path, make_beat(0))
    write_heartbeat(tmp_path, make_beat(1))
    write_heartbeat(tmp_path, make_beat(2, **dead))
    report_gone(tmp_path, place=replace(PLACE, rank=1, local_rank=1), say=said.append)
    assert said == []  # rank 0 is there to say it
    report_gone(tmp_path, place=PLACE, say=said.append)
    assert len(said) == 1 and "rank 2" in said[0]
    report_gone(tmp_path, place=PLACE, say=said.append)
    monkeypatch.setattr(gone_module, "first_word", threading.Lock())  # as in another process
    write_heartbeat(tmp_path, replace(read_heartbeat(tmp_path, 0), **dead))  # which outlives rank 0
    report_gone(tmp_path, place=replace(PLACE, rank=1, local_rank=1), say=said.append)
    assert len(said) == 1


def test_errors_of_a_lost_peer_are_told_from_others():
    assert peer_is_gone(RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]"))
    assert peer_is_gone(RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:618] writev [127.0.0.1]:5: Broken pipe"))
    assert not peer_is_gone(RuntimeError("CUDA out of memory"))
    assert not peer_is_gone(OSError("Connection closed by peer"))


# The watch in this process


def make_watch(folder, said, **changes) -> Watch:
    return Watch(folder, **{"place": Place(), "attempt": "one", "hang_seconds": 900.0, "say": said.append, **changes})


def test_how_a_rank_ends_is_in_its_heartbeat(tmp_path):
    class Stopped(Exception):
        pass

    for error, state in (
        (None, "left"),
        (Stopped(), "left"),
        (RuntimeError("Connection closed by peer"), "left"),
        (OSError("no space"), "failed"),
    ):
        said = []
        with pytest.raises(type(error)) if error else nullcontext(), make_watch(tmp_path, said) as watch:
            watch.progress(7, status="reading")
            assert read_heartbeat(tmp_path, 0).state == "running"
            if error:
                raise error
        beat = read_heartbeat(tmp_path, 0)
        assert (beat.state, beat.step, beat.status, said) == (state, 7, "reading", [])
    assert beat.note == "OSError: no space"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["news.json", "rank-0.json"]


def test_progress_within_a_step_is_counted(tmp_path):
    watch = make_watch(tmp_path, [])
    positions = []
    for step in (3, 3, 3, 4, 4):
        watch.progress(step)
        positions.append(watch._beat("running").position)
    assert positions == [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1)]


def test_the_first_step_may_take_ten_minutes_whatever_the_limit(tmp_path):
    watch = make_watch(tmp_path, [], hang_seconds=5.0)
    patience = []
    for step in (0, 0, 400, 400, 401, 402):  # resumes from step 400
        watch.progress(step)
        patience.append(watch._patience_seconds)
    assert patience == [600, 600, 600, 600, 5, 5]
    assert make_watch(tmp_path, [])._patience_seconds == 900


def test_a_folder_that_cannot_be_written_is_told_once_and_training_goes_on(tmp_path):
    (tmp_path / "file").touch()
    said = []
    with make_watch(tmp_path / "file" / "ranks", said) as watch:
        watch.progress(1)
        watch._write("running")
    assert len(said) == 1 and "training continues" in said[0]


def test_a_stack_asked_for_after_the_end_is_harmless(tmp_path):
    with make_watch(tmp_path, []):
        pass
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not list(tmp_path.glob("stack*"))


def test_many_ranks_write_more_seldom_and_a_short_limit_more_often(tmp_path):
    def seconds(**changes):
        return make_watch(tmp_path, [], **changes)._write_seconds

    assert seconds() == 2
    assert seconds(place=Place(world_size=512)) == 16  # 32 files a second, all together
    assert seconds(hang_seconds=8.0) == 1
    assert seconds(hang_seconds=0.0, place=Place(world_size=512)) == 16


def test_files_of_ranks_that_are_no_more_are_removed_and_others_stay(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    for name in ("rank-1.json", "stack-rank-1.txt", "rank-10.json", "stack-rank-2.txt", "notes.txt"):
        (folder / name).write_text("x")
    with Watch(folder, place=Place(world_size=2), attempt="two", hang_seconds=0, say=print):
        pass
    left = {path.name for path in folder.iterdir()} - {"news.json"}
    assert left - {"stack-rank-0.txt"} == {"rank-0.json", "rank-1.json", "stack-rank-1.txt", "notes.txt"}
