"""Groups of equal samples: a dictionary is the oracle."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.checking.judge import equal_groups


@given(st.lists(st.integers(0, 6), max_size=40), st.data())
def test_groups_are_those_of_a_dictionary(values: list[int], data: st.DataObject):
    among = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))), dtype=bool)
    words = np.array([(value % 2, value // 2) for value in values], dtype=np.uint64).reshape(-1, 2)
    other = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(values), max_size=len(values))), dtype=np.int64)
    expected: dict[int, list[int]] = {}
    for sample, value in enumerate(values):
        if among[sample]:
            expected.setdefault(value, []).append(sample)
    groups = equal_groups(words, among=among)
    wanted = [group for group in expected.values() if len(group) > 1]
    assert [groups[i].tolist() for i in range(len(groups))] == wanted
    assert groups.differ(other).tolist() == [len({int(other[i]) for i in group}) > 1 for group in wanted]
