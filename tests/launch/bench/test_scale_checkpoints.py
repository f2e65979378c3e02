"""The measures of checkpoints in `launch.bench.scale`, in small: counts that must not grow, and who does what."""

import pytest

from shardvit.launch.bench import scale_checkpoints as bench
from shardvit.launch.bench.scale import MEASURES, table
from shardvit.launch.bench.scale_checkpoints import commit_operations, digest_shares, load, saves


def test_a_commit_has_as_few_operations_for_any_number_of_files():
    few, many = commit_operations(files=2), commit_operations(files=40)
    assert few.operations == many.operations
    assert many.operations.total() - many.operations["fsync"] <= 10 and many.operations["fsync"] == 4


def test_no_file_is_touched_on_the_main_thread_between_a_saves_beginning_and_its_end():
    """The files are written, committed and pruned meanwhile: the second save removes the first one's."""
    seen = saves(files=5)
    assert seen.on_main.total() == 0
    assert seen.operations["unlink"] >= 5 + 3 and seen.operations["rename"] == 2 + 1
    assert seen.operations["fsync"] >= 2 * (5 + 2 + 4)  # of two saves: files, and the commit's


def test_ranks_digest_about_as_many_bytes_each():
    by_files, by_pieces = digest_shares(10**8, ranks=16)
    assert by_files >= 2 * 10**8
    assert 14 * 10**8 / 16 <= by_pieces <= 14 * 10**8 / 16 + (16 << 20)


def test_a_rank_opens_its_own_shard_and_looks_at_a_few_files():
    found = load(ranks=4)
    model = {bench._MODEL_FILE}
    for rank, files in enumerate(found.opened):
        assert files == {bench._SHARD_FILE.format(rank)} | (model if rank == 0 else set())
    assert load(ranks=8).looked - found.looked <= 4 * 2


def test_the_table_has_the_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "RANKS", 16)
    monkeypatch.setattr(bench, "_LOADING", 4)
    assert MEASURES["checkpoints"] == "shardvit.launch.bench.scale_checkpoints:checkpoints"
    rows = bench.checkpoints()
    assert [row.now for row in rows if row.wanted] == ["9"]
    assert all(row.before and row.now and row.how for row in rows) and table(rows).count("\n") > 3 * len(rows)
