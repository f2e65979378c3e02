"""A rank's death among many simulated ranks: every host names it, once, and few files are touched. Real deaths are in
tests/distributed."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.bench.scale_ranks import beat_of, counting, simulate_death
from pipeline.ranks import gone
from pipeline.ranks.gone import NEWS_FILE, tell_all_hosts
from pipeline.ranks.heartbeat import read_beat


@pytest.mark.parametrize("victim", [0, 5, 8], ids=["rank 0", "in the middle of a host", "the first of a host"])
def test_every_host_names_the_dead_rank_once_with_few_file_operations(victim: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gone, "LEAVE_SECONDS", 120.0)  # so that a host which waits in vain is not a matter of luck
    hosts, per_host = 6, 4
    told = simulate_death(hosts=hosts, per_host=per_host, victim=victim)
    assert len(told.said) == hosts
    assert all(f"rank {victim} (host node{victim // per_host}, process " in sentence for sentence in told.said)
    assert all("is gone; its last known step was 412" in sentence for sentence in told.said)
    # Looks become rarer by themselves; a slow machine makes a few more of them.
    assert told.operations < 16 * hosts * per_host


def test_without_a_word_from_the_dead_ranks_host_each_host_says_so_once_and_reads_no_more(
    monkeypatch: pytest.MonkeyPatch,
):
    """It was alone on its host."""
    monkeypatch.setattr(gone, "LEAVE_SECONDS", 1.0)
    told = simulate_death(hosts=5, per_host=1, victim=3)
    assert len(told.said) == 4 and all("which one is not known on this host" in sentence for sentence in told.said)
    assert told.operations < 16 * 5


def test_that_a_rank_ended_the_run_replaces_that_one_failed_and_nothing_replaces_that(tmp_path: Path):
    for rank, state in ((1, "failed"), (2, "failed"), (3, "ended"), (4, "ended"), (5, "failed")):
        tell_all_hosts(tmp_path, beat_of(rank, per_host=8, state=state))
        known = read_beat(tmp_path / NEWS_FILE)
        assert known is not None and known.rank == (1 if rank < 3 else 3)
    tell_all_hosts(tmp_path, beat_of(6, per_host=8, state="failed", attempt="the next"))
    known = read_beat(tmp_path / NEWS_FILE)
    assert known is not None and known.rank == 6


def test_file_operations_are_counted_below_their_folder_alone(tmp_path: Path):
    (tmp_path / "inside").mkdir()
    with counting(tmp_path / "inside") as counter:
        (tmp_path / "inside" / "a").write_text("x")
        (tmp_path / "b").write_text("x")
        list((tmp_path / "inside").iterdir())
        (tmp_path / "inside" / "a").unlink()
    (tmp_path / "inside" / "c").write_text("x")
    assert counter.operations == 3
