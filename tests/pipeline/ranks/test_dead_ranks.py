"""A rank's death among many simulated ranks: each log names it, once, and few files are touched. Real deaths are in
tests/distributed."""

import os
from pathlib import Path

import pytest

from shardvit.launch.bench.scale_ranks import beat_of, simulate_death
from shardvit.pipeline.ranks import dead_ranks as gone
from shardvit.pipeline.ranks.dead_ranks import About, is_to_say, is_to_say_mistake, tell_all_hosts
from shardvit.pipeline.ranks.heartbeat import read_heartbeat, write_heartbeat
from shardvit.pipeline.ranks.place import Log, Place
from shardvit.pipeline.ranks.process import this_machine


@pytest.mark.parametrize("victim", [0, 5, 8], ids=["rank 0", "in the middle of a host", "the first of a host"])
@pytest.mark.parametrize(("log", "lines"), [("of a host", 6), ("of the run", 1)])
def test_each_log_names_the_dead_rank_once_with_few_file_operations(
    victim: int, log: Log, lines: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gone, "LEAVE_SECONDS", 120.0)  # so that a host which waits in vain is not a matter of luck
    hosts, per_host = 6, 4
    told = simulate_death(hosts=hosts, per_host=per_host, victim=victim, log=log)
    assert len(told.said) == lines
    assert all(f"rank {victim} (host node{victim // per_host}, process " in sentence for sentence in told.said)
    assert all("is gone; its last known step was 412" in sentence for sentence in told.said)
    # Looks become rarer by themselves; a slow machine makes a few more of them.
    assert told.operations < 16 * hosts * per_host


@pytest.mark.parametrize(("log", "lines"), [("of a host", 4), ("of the run", 1)])
def test_without_a_word_from_the_dead_ranks_host_each_log_says_so_once_and_no_more_is_read(
    log: Log, lines: int, monkeypatch: pytest.MonkeyPatch
):
    """It was alone on its host."""
    monkeypatch.setattr(gone, "LEAVE_SECONDS", 1.0)
    told = simulate_death(hosts=5, per_host=1, victim=3, log=log)
    assert len(told.said) == lines and all("which one is not known on this host" in sentence for sentence in told.said)
    assert told.operations < 16 * 5


def test_of_one_log_the_first_is_to_say_it_and_a_name_is_said_even_after_that_nobody_knows(tmp_path: Path):
    asks: list[tuple[str, About]] = [
        *(("one", "nobody known"), ("one", "nobody known"), ("one", "a rank"), ("one", "a rank")),
        *(("two", "a rank"), ("two", "nobody known"), ("two", "a rank")),
    ]
    for log, says in (("of the run", [True, False, True, False, True, False, False]), ("of a host", [True] * 7)):
        place = Place(log=log)
        assert [is_to_say(tmp_path, place=place, attempt=attempt, about=about) for attempt, about in asks] == says
    assert is_to_say(tmp_path, place=Place(log="of the run"), attempt="one", about="a mistake")
    assert not is_to_say(tmp_path, place=Place(log="of the run"), attempt="one", about="a mistake")
    for _ in range(2):  # a folder that cannot be written to silences nobody
        assert is_to_say(tmp_path / "gone", place=Place(log="of the run"), attempt="one", about="a rank")


def test_a_mistake_that_many_ranks_find_is_said_once_in_one_log(tmp_path: Path):
    here = {"machine": this_machine(), "pid": os.getpid()}
    for rank in range(3):
        write_heartbeat(tmp_path, beat_of(rank, per_host=8, **here))
    for log, says in (("of the run", [True, False, False]), ("of a host", [True] * 3)):
        assert [is_to_say_mistake(tmp_path, place=Place(rank, 3, log=log)) for rank in range(3)] == says
    assert is_to_say_mistake(tmp_path, place=Place(7, 8, log="of the run"))  # it has no heartbeat yet


def test_that_a_rank_ended_the_run_replaces_that_one_failed_and_nothing_replaces_that(tmp_path: Path):
    for rank, state in ((1, "failed"), (2, "failed"), (3, "ended"), (4, "ended"), (5, "failed")):
        tell_all_hosts(tmp_path, beat_of(rank, per_host=8, state=state))
        known = read_heartbeat(tmp_path, "news")
        assert known is not None and known.rank == (1 if rank < 3 else 3)
    tell_all_hosts(tmp_path, beat_of(6, per_host=8, state="failed", attempt="the next"))
    known = read_heartbeat(tmp_path, "news")
    assert known is not None and known.rank == 6
