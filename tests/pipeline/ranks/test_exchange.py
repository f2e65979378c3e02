"""Exchanges between ranks: everyone's values in rank order for any number of ranks, in few messages."""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter, defaultdict

import pytest
import torch

from pipeline.ranks.exchange import gather_bytes, gather_rows, rounds


class Board:
    """Point-to-point messages between threads; counts those of each rank, and whom it talks to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: Counter[int] = Counter()
        self.partners: dict[int, set[int]] = defaultdict(set)
        self.boxes: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()

    def box(self, source: int, target: int, tag: int) -> queue.Queue[torch.Tensor]:
        with self.lock:
            return self.boxes[source, target, tag]


class Done:
    def wait(self) -> None:
        return


class Receipt:
    def __init__(self, box: queue.Queue[torch.Tensor], into: torch.Tensor) -> None:
        self._box, self._into = box, into

    def wait(self) -> None:
        found = self._box.get(timeout=240)
        assert found.shape == self._into.shape, "a message of another length"
        self._into.copy_(found)


class Member:
    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._board.size

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Done:
        self._board.sent[self._rank] += 1
        self._board.partners[self._rank].add(dst)
        self._board.box(self._rank, dst, tag).put(tensors[0].clone())
        return Done()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> Receipt:
        return Receipt(self._board.box(src, self._rank, tag), tensors[0])


def on_all(size: int, call) -> tuple[list, Board]:
    board, found = Board(size), [None] * size

    def work(rank: int) -> None:
        found[rank] = call(Member(board, rank), rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, board


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 33, 64])
def test_everyone_has_all_rows_in_rank_order_after_log2_messages(size: int):
    expected = torch.stack([torch.arange(3, dtype=torch.float64) + 10 * rank for rank in range(size)])
    found, board = on_all(size, lambda group, rank: gather_rows(group, expected[rank], tag=1))
    assert all(torch.equal(rows, expected) for rows in found)
    assert rounds(size) == math.ceil(math.log2(size))
    assert all(board.sent[rank] == rounds(size) for rank in range(size))
    assert all(len(board.partners[rank]) == rounds(size) for rank in range(size))


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [5, 0, 1, 700, 3], [0, 0, 9, 0], [1] * 17])
def test_bytes_of_any_length_arrive_whole(lengths: list[int]):
    values = [bytes([rank]) * length for rank, length in enumerate(lengths)]
    found, board = on_all(len(lengths), lambda group, rank: gather_bytes(group, values[rank], tag=3))
    assert found == [values] * len(lengths)
    assert max(board.sent.values(), default=0) <= 2 * rounds(len(lengths))


def test_values_of_a_later_exchange_are_not_taken_for_those_of_an_earlier_one():
    """A rank may be an exchange ahead of another."""

    def twice(group: Member, rank: int) -> list[list[float]]:
        return [gather_rows(group, torch.tensor([float(rank + tag)]), tag=tag).flatten().tolist() for tag in (1, 2)]

    found, _ = on_all(6, twice)
    assert found == [[[float(rank + tag) for rank in range(6)] for tag in (1, 2)]] * 6


def test_at_1024_ranks_ten_messages_follow_each_other():
    assert rounds(1024) == 10 and rounds(1025) == 11 and rounds(1) == 0
