"""What a grid's result is worth: the error of a score, and what lies behind the edge."""

from __future__ import annotations

import math

import pytest

from launch.sweep.grid import Axis
from launch.sweep.worth import beyond, standard_error, widened


def test_the_standard_error_is_that_of_a_share_and_never_zero() -> None:
    assert standard_error(0.6, images=10_000) == pytest.approx(math.sqrt(0.6 * 0.4 / 10_000), rel=1e-3)
    for score in (0.0, 1.0):
        assert 0.005 < standard_error(score, images=100) < 0.015


@pytest.mark.parametrize(
    ("values", "best", "further"),
    [
        (("0.003", "0.01", "0.03"), "0.03", "0.09"),
        (("0.003", "0.01", "0.03"), "0.003", "0.0009"),
        (("0.03", "0.01", "0.003"), "0.03", "0.09"),  # in any order
        (("0.003", "0.01", "0.03"), "0.01", None),
        (("1e-05", "2e-05"), "2e-05", "4e-05"),
        (("128", "256"), "256", "512"),
        (("1", "2", "3"), "1", None),  # a half is no whole number
        (("100.0", "150.5"), "150.5", "230"),
        (("30 epochs", "90 epochs"), "90 epochs", None),
        (("0", "0.1", "0.2"), "0.2", "0.3"),
        (("0", "0.1", "0.2"), "0", None),
        (("-1", "1"), "1", "3"),
        (("cosine", "linear"), "linear", None),
        (("[0.05, 1.0]", "[0.2, 1.0]"), "[0.2, 1.0]", None),
        (("0.1",), "0.1", None),
    ],
)
def test_what_lies_beyond_goes_on_in_the_grids_own_steps(
    values: tuple[str, ...], best: str, further: str | None
) -> None:
    assert beyond(values, best) == further


def test_each_axis_is_widened_where_the_best_lies_at_its_edge() -> None:
    axes = (Axis("lr", ("1e-2", "0.03")), Axis("depth", ("2", "4", "8")), Axis("kind", ("a", "b")))
    points = [{"lr": lr, "depth": depth, "kind": "a"} for lr in ("0.01", "0.03") for depth in ("2", "4", "8")]
    wider = widened(axes, points, best={"lr": "0.03", "depth": "4", "kind": "a"})
    assert wider == (Axis("lr", ("1e-2", "0.03", "0.09")), *axes[1:])
    assert widened(axes[1:], points, best={"lr": "0.03", "depth": "4", "kind": "a"}) == axes[1:]
