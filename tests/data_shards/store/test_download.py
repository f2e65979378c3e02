"""Waits after failures grow, and end."""

import pytest

from shardvit.data_shards.store.download import Backoff, RetryPolicy, StoreError
from shardvit.data_shards.store.remote_errors import Transient


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_delays_double_up_to_a_limit_and_are_drawn_in_full(draw: float):
    policy = RetryPolicy(first_delay_seconds=1, most_delay_seconds=10)
    slept: list[float] = []
    patience = Backoff("http://h/x", policy=policy, sleep=slept.append, draw=lambda: draw)
    for _ in range(6):
        patience.wait(Transient("down"), spent_seconds=0)
    assert slept == [draw * limit for limit in (1, 2, 4, 8, 10, 10)]


def test_patience_ends_after_the_time_that_is_allowed_and_progress_renews_it():
    slept: list[float] = []
    patience = Backoff("http://h/x", policy=RetryPolicy(), sleep=slept.append, draw=lambda: 0.5)

    def wait_for_ever() -> None:
        while True:
            patience.wait(Transient("down"), spent_seconds=10)

    with pytest.raises(StoreError, match="in a row"):
        wait_for_ever()
    assert 500 < sum(slept) + 10 * len(slept) < 600
    patience.progress()
    patience.wait(Transient("down"), spent_seconds=10)
    assert slept[-1] == 0.5
