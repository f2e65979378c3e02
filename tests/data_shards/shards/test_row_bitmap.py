"""Which samples of a tar count, written into the manifest and read back; what is malformed is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.shards.row_bitmap import counted_rows, pack_rows, stored_rows, unpack_rows


@given(st.lists(st.booleans(), max_size=70))
def test_a_choice_comes_back(counts: list[bool]):
    text = pack_rows(np.array(counts, np.bool_))
    assert unpack_rows(text).tolist() == counts
    assert (stored_rows(text), counted_rows(text)) == (len(counts), sum(counts))


def test_as_numpy_packs_bits():
    assert pack_rows(np.array([True] + [False] * 8)) == "9:gAA="


@pytest.mark.parametrize("text", ["", "9", "9:", "9:gA==", "x:gAA=", "-1:", "9:gAAA", "9:gAE=", "9:g A A=", "²:gA=="])
def test_malformed_texts_are_refused(text: str):
    assert counted_rows(text) is None
