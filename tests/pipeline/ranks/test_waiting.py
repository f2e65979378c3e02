"""Rank 0 works alone while the others wait: longer than a collective may take, and a death is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.ranks import waiting
from pipeline.ranks.place import Place
from pipeline.ranks.waiting import while_others_wait
from tests.saving import ThreadRanks

PATIENCE_SECONDS = 240.0


def two_ranks() -> list[Any]:
    barrier, board = threading.Barrier(2), [None, None]
    return [ThreadRanks(Place(rank=rank, world_size=2), barrier=barrier, board=board) for rank in range(2)]


def other(ranks: Any, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=while_others_wait, args=(ranks, work), daemon=True)
    thread.start()
    return thread


def test_the_others_wait_in_turns_until_it_is_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "_TURN_SECONDS", 0.001)
    main, second = two_ranks()
    turns, enough = [0], threading.Event()
    exchange = second.gather_objects

    def counted(value: object) -> list[object]:
        turns[0] += 1
        if turns[0] == 3:
            enough.set()
        return exchange(value)

    second.gather_objects = counted
    thread = other(second, lambda: pytest.fail("rank 0 alone works"))
    done: list[bool] = []

    def work() -> None:
        assert enough.wait(PATIENCE_SECONDS) and thread.is_alive()  # several turns have passed in one piece of work
        done.append(True)

    while_others_wait(main, work)
    thread.join(PATIENCE_SECONDS)
    assert done == [True] and not thread.is_alive() and turns[0] >= 3


def test_an_error_ends_the_others_wait_too():
    main, second = two_ranks()
    thread = other(second, lambda: None)
    with pytest.raises(ValueError, match="no such model"):
        while_others_wait(main, lambda: (_ for _ in ()).throw(ValueError("no such model")))
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_a_death_is_raised_when_the_work_is_done():
    def broken(value: object) -> list[object]:
        raise RuntimeError("Connection closed by peer")

    main = two_ranks()[0]
    main.gather_objects = broken
    done: list[bool] = []
    with pytest.raises(RuntimeError, match="closed by peer"):
        while_others_wait(main, lambda: done.append(True))
    assert done == [True]


def test_alone_it_is_a_call():
    ranks: Any = ThreadRanks(Place(), barrier=threading.Barrier(2), board=[None])
    done: list[bool] = []
    while_others_wait(ranks, lambda: done.append(True))
    assert done == [True]
