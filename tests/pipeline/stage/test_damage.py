"""The account of damaged images: each once, whoever met it and however often; the budget the same on all ranks."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.data_shards.loading.batch import Batch, Fault
from shardvit.pipeline.stage.damage import FaultLedger


class SharedRanks:
    """Several ranks in one process, as threads; gathers like `Ranks`."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: dict[int, Any]) -> None:
        self.place = SimpleNamespace(is_main=rank == 0, rank=rank)
        self._barrier, self._board = barrier, board

    def gather_objects(self, value: object) -> list[object]:
        self._board[self.place.rank] = value
        self._barrier.wait()
        everyone = [self._board[rank] for rank in sorted(self._board)]
        self._barrier.wait()
        return everyone


def batch_with(*faults: Fault, substituted: int = 0, rows: int = 4) -> Batch:
    return Batch(
        images=torch.zeros(rows, 2, 2, 3, dtype=torch.uint8),
        mirrored=torch.zeros(rows, dtype=torch.bool),
        labels=torch.zeros(rows, dtype=torch.int64),
        counted=torch.ones(rows, dtype=torch.bool),
        substituted=torch.arange(rows) < substituted,
        samples=torch.arange(rows),
        epochs=torch.zeros(rows, dtype=torch.int64),
        keys=tuple("abcd"[:rows]),
        faults=faults,
    )


def fault(key: str, shard: str = "s.tar") -> Fault:
    return Fault(shard=shard, key=key, reason="broken")


def ledger(folder: Path, *, max_share: float = 0.5, images: int = 10) -> FaultLedger:
    file = folder / "corrupt_samples.jsonl"
    return FaultLedger(file, num_samples={"train": images, "eval": images}, max_share=max_share)


def settle_alone(account: FaultLedger) -> Any:
    return account.settle(SharedRanks(0, threading.Barrier(1), {}))  # pyright: ignore[reportArgumentType]


def rows_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "corrupt_samples.jsonl").read_text().splitlines()]


def test_an_image_counts_once_however_often_it_is_met(tmp_path: Path):
    account = ledger(tmp_path)
    for _ in range(3):
        account.note(batch_with(fault("a"), fault("b"), substituted=2), use="train", rows=4)
    settled = settle_alone(account)
    assert [one.key for _, one in settled.new] == ["a", "b"] and settled.substituted_images == 6
    account.note(batch_with(fault("b"), substituted=1), use="train", rows=4)
    settled = settle_alone(account)
    assert settled.new == () and settled.substituted_images == 1
    assert rows_of(tmp_path) == [
        {"set": "train", "shard": "s.tar", "key": key, "reason": "broken"} for key in ("a", "b")
    ]


def test_the_row_that_is_only_mixed_in_is_not_counted(tmp_path: Path):
    account = ledger(tmp_path)
    account.note(batch_with(fault("a"), substituted=4), use="train", rows=3)
    assert settle_alone(account).substituted_images == 3


def test_the_same_key_in_another_shard_or_set_is_another_image(tmp_path: Path):
    account = ledger(tmp_path)
    account.note(batch_with(fault("a"), fault("a", shard="t.tar")), use="train", rows=4)
    account.note(batch_with(fault("a")), use="eval", rows=4)
    assert len(settle_alone(account).new) == 3 == len(account)


def test_all_ranks_know_what_one_has_met_and_only_the_first_writes(tmp_path: Path):
    barrier, board, found = threading.Barrier(3), {}, {}
    accounts = [ledger(tmp_path, max_share=0.1) for _ in range(3)]
    accounts[1].note(batch_with(fault("x"), substituted=1), use="train", rows=4)
    accounts[2].note(batch_with(fault("x"), fault("y"), substituted=2), use="train", rows=4)

    def settle(rank: int) -> None:
        found[rank] = accounts[rank].settle(SharedRanks(rank, barrier, board))  # pyright: ignore[reportArgumentType]

    threads = [threading.Thread(target=settle, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2] and found[0].substituted_images == 3
    assert [row["key"] for row in rows_of(tmp_path)] == ["x", "y"]
    assert accounts[0].complaint and accounts[0].complaint == accounts[1].complaint == accounts[2].complaint


@pytest.mark.parametrize(
    ("max_share", "met", "over"), [(0.0, 1, True), (0.1, 1, False), (0.1, 2, True), (0.2, 2, False)]
)
def test_the_budget_is_a_share_of_each_set(tmp_path: Path, max_share: float, met: int, over: bool):
    for use in ("train", "eval"):
        folder = tmp_path / use
        folder.mkdir()
        account = ledger(folder, max_share=max_share)
        account.note(batch_with(*(fault(key) for key in "abcd"[:met])), use=use, rows=4)
        assert account.complaint is None
        settle_alone(account)
        assert bool(account.complaint) == over
        if account.complaint:
            assert "'a' of s.tar" in account.complaint and "max_corrupt_share" in account.complaint


def test_names_that_are_no_text_and_lines_torn_in_a_character_do_no_harm(tmp_path: Path):
    account = ledger(tmp_path)
    odd = "image \udce9 \u2028 \u00e9"
    account.note(batch_with(fault(odd)), use="train", rows=4)
    settle_alone(account)
    with (tmp_path / "corrupt_samples.jsonl").open("ab") as stream:
        stream.write(b'{"set": "train", "shard": "\xc3')
    again = ledger(tmp_path)
    again.note(batch_with(fault(odd)), use="train", rows=4)
    assert len(again) == 1 and settle_alone(again).new == ()


def test_a_resumed_stage_remembers(tmp_path: Path):
    account = ledger(tmp_path, max_share=0.1)
    account.note(batch_with(fault("a")), use="train", rows=4)
    settle_alone(account)
    with (tmp_path / "corrupt_samples.jsonl").open("a") as stream:
        stream.write('{"set": "train", "sha')  # torn by a kill
    again = ledger(tmp_path, max_share=0.1)
    assert len(again) == 1 and again.complaint is None
    again.note(batch_with(fault("a"), fault("b")), use="train", rows=4)
    assert [one.key for _, one in settle_alone(again).new] == ["b"]
    assert again.complaint
    assert ledger(tmp_path, max_share=0.1).complaint == again.complaint
