"""Laws of which checkpoints are kept, over all ways to save a run."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shardvit.pipeline.checkpoint.store import Retention, to_delete

METRICS = st.none() | st.sampled_from([0.1, 0.2, 0.2, 0.5, math.nan, math.inf, -math.inf])
RUNS = st.dictionaries(st.integers(1, 60), METRICS, min_size=1)
RETENTIONS = st.builds(
    Retention,
    last=st.integers(1, 5),
    every_steps=st.sampled_from([0, 1, 7, 10, 100]),
    best=st.sampled_from([None, "val/loss", "val/top1"]),
)


Run = dict[int, float | None]


def kept(run: Run, retention: Retention) -> set[int]:
    return set(run) - set(to_delete(run, retention=retention))


def in_turn(run: Run, retention: Retention) -> set[int]:
    """What is left when each was saved in turn and all were pruned after each."""
    there: Run = {}
    for step, metric in sorted(run.items()):
        there[step] = metric
        left = kept(there, retention)
        there = {one: there[one] for one in there if one in left}
    return set(there)


@given(RUNS, RETENTIONS)
def test_the_last_ones_are_kept_and_nothing_is_named_that_is_not_there(run, retention):
    gone = to_delete(run, retention=retention)
    steps = sorted(run)
    assert gone == sorted(set(gone)) and set(gone) <= set(steps)
    assert set(steps[-retention.last :]) <= set(steps) - set(gone)
    assert steps[-1] not in gone


@given(RUNS, RETENTIONS)
def test_nothing_else_is_kept_than_what_one_of_the_three_rules_asks_for(run, retention):
    rules = [
        Retention(last=retention.last),
        Retention(1, every_steps=retention.every_steps),
        Retention(1, 0, retention.best),
    ]
    assert kept(run, retention) == set().union(*(kept(run, rule) for rule in rules))
    assert kept(run, Retention(last=retention.last)) == set(sorted(run)[-retention.last :])


@given(RUNS, RETENTIONS, st.integers(1, 30))
def test_there_is_always_one_that_is_old_enough_to_go_back_to(run, retention, reach):
    """If any was ever saved that was old enough: the newest of those."""
    for newest in sorted(run):
        so_far = {step: metric for step, metric in run.items() if step <= newest}
        old_enough = [step for step in so_far if step <= newest - reach]
        left = in_turn(so_far, replace(retention, reach_steps=reach))
        assert not old_enough or max(old_enough) in left


@given(RUNS, RETENTIONS)
def test_pruning_twice_is_pruning_once(run, retention):
    left = {step: run[step] for step in kept(run, retention)}
    assert to_delete(left, retention=retention) == []


@given(RUNS, RETENTIONS)
def test_what_was_pruned_on_the_way_would_not_be_kept_at_the_end(run, retention):
    """One pass over a whole run leaves what pruning after each save leaves: nothing was thrown away too early."""
    assert in_turn(run, retention) == kept(run, retention)


@given(RUNS, st.sampled_from([3, 10]))
def test_what_is_kept_for_good_stays_whatever_comes_after(run, every_steps):
    retention = Retention(last=1, every_steps=every_steps)
    steps = sorted(run)
    first = {min(s for s in steps if s // every_steps == n) for n in {s // every_steps for s in steps} - {0}}
    assert kept(run, retention) == first | {steps[-1]}
    later = {**run, 1000: None}
    assert first <= kept(later, retention)


@given(RUNS, st.sampled_from(["val/loss", "val/top1", "val/accuracy"]))
def test_the_best_is_the_lowest_loss_or_the_highest_score_and_of_equals_the_newest(run, best):
    known = {step: metric for step, metric in run.items() if metric is not None and not math.isnan(metric)}
    newest = max(run)
    expected = {newest}
    if known:
        value = (min if best == "val/loss" else max)(known.values())
        expected.add(max(step for step, metric in known.items() if metric == value))
    assert kept(run, Retention(last=1, best=best)) == expected


def test_an_example():
    run = {100: 2.0, 150: 0.5, 200: 1.0, 250: None, 300: 0.9, 350: 1.5}
    assert kept(run, Retention(last=2)) == {300, 350}
    assert kept(run, Retention(last=1, every_steps=100)) == {100, 200, 300, 350}
    assert kept(run, Retention(last=1, best="val/loss")) == {150, 350}
    assert kept(run, Retention(last=1, best="val/top1")) == {100, 350}
    minutes: Run = dict.fromkeys((90, 170, 205, 260, 310))  # saved by the clock, never at a multiple
    assert kept(minutes, Retention(last=1, every_steps=100)) == {170, 205, 310}
