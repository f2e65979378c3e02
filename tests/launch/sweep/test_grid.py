"""The grid: which commas separate values, which points there are, and names that tell them apart."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.launch.sweep.grid import (
    Axis,
    extend_grid,
    grid_points,
    point_names,
    read_grid,
    standard_error,
    value_beyond,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.003,0.01,0.03", ("0.003", "0.01", "0.03")),
        ("90 epochs, 300 epochs", ("90 epochs", "300 epochs")),
        ("[0.05,1],[0.2,1]", ("[0.05,1]", "[0.2,1]")),
        ("{name: sgd, lr: 1},{name: adamw, lr: 2}", ("{name: sgd, lr: 1}", "{name: adamw, lr: 2}")),
        ("'a,b',c", ("'a,b'", "c")),
        ("[['x,]', 1], 2],3", ("[['x,]', 1], 2]", "3")),
        ("it's,its", ("it's", "its")),
    ],
)
def test_commas_outside_of_quotes_and_brackets_separate(text: str, values: tuple[str, ...]):
    assert read_grid(["seed=1", f"k={text}"]) == (["seed=1"], (Axis("k", values),))


@pytest.mark.parametrize("text", ["1", "[1,2]", "'a,b'", "{a: 1, b: 2}", "x-{000..127}.tar"])
def test_one_value_is_an_override_of_all(text: str):
    assert read_grid([f"k={text}", "other=1,2"])[0] == [f"k={text}"]


@pytest.mark.parametrize("arguments", [["k=1,"], ["k=1,,2"], ["k=1,2", "k=3,4"]])
def test_what_is_no_grid_is_refused(arguments: list[str]):
    with pytest.raises(UserError):
        read_grid(arguments)


def test_a_grid_that_nobody_wants_is_refused():
    with pytest.raises(UserError, match="10,000"):
        grid_points(read_grid([f"k{n}={','.join(map(str, range(10)))}" for n in range(4)])[1])


def test_the_points_are_the_product_in_the_order_of_typing():
    assert [tuple(each.values()) for each in grid_points((Axis("a", ("1", "2")), Axis("b", ("x", "y"))))] == [
        *(("1", "x"), ("1", "y")),
        *(("2", "x"), ("2", "y")),
    ]


def test_names_say_what_the_point_is():
    points = grid_points(
        (Axis("stages.finetune.optimizer.lr", ("0.01",)), Axis("stages.finetune.duration", ("2 epochs",)))
    )
    assert point_names(points) == ["lr-0.01_duration-2-epochs"]
    both = grid_points((Axis("stages.pretrain.optimizer.lr", ("1",)), Axis("stages.finetune.optimizer.lr", ("2",))))
    assert point_names(both) == ["pretrain.optimizer.lr-1_finetune.optimizer.lr-2"]


@given(st.lists(st.text(max_size=30), min_size=1, max_size=6, unique=True))
def test_names_are_folders_of_their_own_whatever_the_values(values: list[str]):
    points = [{"stages.finetune.train": value} for value in values]
    names = point_names(points)
    assert len({name.casefold() for name in names}) == len(names)
    assert all(re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,150}", name) and name != "final" for name in names)


def test_a_point_keeps_its_name_when_values_are_added():
    few, more = ([{"a.lr": value} for value in values] for values in (("0.1", "0.2"), ("0.05", "0.1", "0.2")))
    assert point_names(few) == point_names(more)[1:]


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
    assert value_beyond(values, best) == further


def test_each_axis_is_extended_where_the_best_lies_at_its_edge() -> None:
    axes = (Axis("lr", ("1e-2", "0.03")), Axis("depth", ("2", "4", "8")), Axis("kind", ("a", "b")))
    points = [{"lr": lr, "depth": depth, "kind": "a"} for lr in ("0.01", "0.03") for depth in ("2", "4", "8")]
    wider = extend_grid(axes, points, best={"lr": "0.03", "depth": "4", "kind": "a"})
    assert wider == (Axis("lr", ("1e-2", "0.03", "0.09")), *axes[1:])
    assert extend_grid(axes[1:], points, best={"lr": "0.03", "depth": "4", "kind": "a"}) == axes[1:]
