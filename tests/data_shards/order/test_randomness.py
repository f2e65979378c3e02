"""Random numbers: the mixer against a second implementation, their distribution, and that none depends on another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shardvit.data_shards.order.randomness import hash_words, mix, permute, uniforms

MASK = 2**64 - 1
law = settings(max_examples=60, deadline=None)  # a deadline measures how busy the machine is

WORDS = st.integers(0, MASK)


def splitmix_finaliser(value: int) -> int:
    """SplitMix64 in Python's integers, with the constants of Stafford's Mix13, as in splitmix64.c."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def chained(*words: int) -> int:
    state = 0
    for word in words:
        state = splitmix_finaliser(((state ^ word) + 0x9E3779B97F4A7C15) & MASK)
    return state


def test_the_mixer_gives_splitmix64s_published_stream():
    # The first outputs of splitmix64.c (Vigna, prng.di.unimi.it) for the seeds 0 and 1234567.
    assert int(hash_words(0)[0]) == 0xE220A8397B1DCDAF
    state = np.array([1234567], dtype=np.uint64)
    increments = np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state + increments).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@law
@given(st.lists(WORDS, min_size=1, max_size=6))
def test_hash_equals_pure_python(words: list[int]):
    assert hash_words(*words).tolist() == [chained(*words)]


@law
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=20), WORDS)
def test_hash_broadcasts_scalars_and_columns(pairs: list[tuple[int, int]], word: int):
    first, second = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    assert hash_words(word, first, second).tolist() == [chained(word, a, b) for a, b in pairs]


# ---- uniform numbers


def test_uniforms_are_uniform_in_every_column_and_over_every_kind_of_key():
    samples, epochs = np.arange(20_000), np.arange(2_000)
    for numbers in (uniforms(3, 7, 0, samples, draws=23), uniforms(3, 7, epochs, 5, draws=23)):
        assert numbers.min() >= 0 and numbers.max() < 1 and numbers.dtype == np.float64
        assert min(stats.kstest(column, "uniform").pvalue for column in numbers.T) > 1e-4
    over_draws = uniforms(0, draws=20_000)[0]
    assert stats.kstest(over_draws, "uniform").pvalue > 1e-3


def test_neighbouring_columns_and_keys_are_independent():
    numbers = uniforms(3, 7, np.arange(40_000), draws=3)
    for a, b in ((numbers[:, 0], numbers[:, 1]), (numbers[:, 1], numbers[:, 2]), (numbers[:-1, 0], numbers[1:, 0])):
        cells = np.histogram2d(a, b, bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(cells.ravel()).pvalue > 1e-3


def test_the_largest_word_still_gives_less_than_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "shardvit.data_shards.order.randomness.hash_words", lambda *words: np.full((1, 1), MASK, dtype=np.uint64)[0]
    )
    assert 0.999999 < uniforms(0, draws=1).max() < 1


@law
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30), st.data())
def test_a_rows_numbers_depend_on_its_own_key_alone(keys: list[int], data: st.DataObject):
    one = data.draw(st.integers(0, len(keys) - 1))
    together = uniforms(1, np.array(keys), draws=5)
    np.testing.assert_array_equal(together[one], uniforms(1, keys[one], draws=5)[0])
    np.testing.assert_array_equal(together[one, :3], uniforms(1, keys[one], draws=3)[0])


# ---- permutations


def test_every_size_up_to_300_is_permuted_whole():
    for size in range(1, 301):
        for key in (0, 2**63 + 5):
            assert sorted(permute(np.arange(size), size=size, key=key).tolist()) == list(range(size)), size


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 100_003])
def test_large_sizes_are_permuted_whole(size: int):
    assert (np.sort(permute(np.arange(size), size=size, key=9)) == np.arange(size)).all()


@law
@given(st.integers(10**6, 2**52), WORDS, st.data())
def test_huge_sizes_stay_inside_and_do_not_collide(size: int, key: int, data: st.DataObject):
    first = data.draw(st.integers(0, size - 500))
    found = permute(np.arange(first, first + 500), size=size, key=key)
    assert found.min() >= 0 and found.max() < size and len(set(found.tolist())) == 500


@law
@given(st.lists(st.tuples(st.integers(1, 10**9), WORDS, st.integers(0, 10**9)), min_size=1, max_size=20), st.data())
def test_an_entry_does_not_depend_on_what_else_is_asked(triples: list[tuple[int, int, int]], data: st.DataObject):
    size, key, index = (np.array(column, dtype=np.uint64) for column in zip(*triples, strict=True))
    index %= size
    together = permute(index, size=size, key=key)
    one = data.draw(st.integers(0, len(triples) - 1))
    assert permute(index[one : one + 1], size=size[one], key=key[one]).tolist() == [int(together[one])]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17, 64, 1000])
def test_permutations_are_fair_over_their_keys(size: int):
    """Small sizes too: the last window of a lane, or the whole lane of a small data set, may hold so few."""
    keys = hash_words(7, np.arange(40_000))
    first, second = (permute(np.full(len(keys), index), size=size, key=keys) for index in (0, 1))
    assert stats.chisquare(np.bincount(first, minlength=size)).pvalue > 1e-3
    distance = np.bincount((second - first) % size, minlength=size)
    assert distance[0] == 0
    if size > 2:
        assert stats.chisquare(distance[1:]).pvalue > 1e-3


def test_all_permutations_of_four_are_equally_likely():
    keys = hash_words(7, np.arange(40_000))
    entries = np.stack([permute(np.full(len(keys), index), size=4, key=keys) for index in range(4)], axis=1)
    _, counts = np.unique(entries @ np.array([64, 16, 4, 1]), return_counts=True)
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > 1e-3


def test_pinned_values():
    """A change of these numbers is a change of every run's order and crops: no run could be resumed across it."""
    assert [hex(word) for word in hash_words(1, 2, np.arange(3)).tolist()] == GOLDEN_HASHES
    assert uniforms(3, 0, np.array([0, 1]), draws=2).tolist() == GOLDEN_UNIFORMS
    assert permute(np.arange(12), size=12, key=5).tolist() == GOLDEN_SMALL
    assert permute(np.arange(4), size=10**9, key=5).tolist() == GOLDEN_LARGE


GOLDEN_HASHES = ["0xe68e6fc01df08360", "0xb815246f417cade2", "0xe930af93af0daf48"]
GOLDEN_UNIFORMS = [[0.7177539261763675, 0.15594696364541394], [0.38039550763023533, 0.7098993065729959]]
GOLDEN_SMALL = [4, 8, 6, 10, 5, 2, 9, 1, 3, 7, 0, 11]
GOLDEN_LARGE = [692355307, 559346753, 168042849, 644508943]
