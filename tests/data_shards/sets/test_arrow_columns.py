"""Arrays made of buffers equal pyarrow's own."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shardvit.data_shards.sets.arrow_columns import arrow_array, numbers_of


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, -3], pa.int32()),
        ([0.5, None, 2.0, float("nan")], pa.float32()),
        (["a", None, "", "grüß"], pa.string()),
        ([[1, 2], [], [3]], pa.list_(pa.int64())),
        ([True, False] * 9, pa.bool_()),
        ([], pa.string()),
        ([], pa.list_(pa.int64())),
    ],
)
def test_it_is_what_pyarrow_makes(values: list[Any], kind: pa.DataType):
    made = arrow_array(values, kind)
    made.validate(full=True)
    assert str(made.to_pylist()) == str(pa.array(values, kind).to_pylist())  # nan differs from itself
    assert made.null_count == values.count(None)


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()])
def test_numbers_come_back(kind: pa.DataType):
    made = arrow_array([1, 2, 3], kind).slice(1)
    np.testing.assert_array_equal(numbers_of(made), made.to_numpy())
    np.testing.assert_array_equal(numbers_of(pa.chunked_array([made, made])), [2, 3, 2, 3])
    np.testing.assert_array_equal(numbers_of(arrow_array([[1], [2, 3]], pa.list_(pa.int64())).slice(1)), [2, 3])
