"""Curves of characters: the right values at the right places, of any numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.launch.terminal_curves import bar, draw_curves


def chart(points: list[tuple[int, float]], *, width: int, height: int, mark: str = "") -> list[str]:
    steps, values = zip(*points, strict=True) if points else ((), ())
    return draw_curves([(steps, values)], width=width, height=height, marks=[mark])


POINTS = st.lists(st.tuples(st.integers(0, 2**62), st.floats()), max_size=40)


def dots(lines: list[str], *, first_column: int) -> set[tuple[int, int]]:
    """(column, row from the top) of every dot of a braille chart."""
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    found: set[tuple[int, int]] = set()
    for y, line in enumerate(lines):
        for x, cell in enumerate(line[first_column:]):
            code = 0 if cell == " " else ord(cell) - 0x2800
            found |= {
                (2 * x + across, 4 * y + down) for down in range(4) for across in range(2) if code & bits[down][across]
            }
    return found


@given(POINTS, st.integers(20, 90), st.integers(3, 12), st.sampled_from(["", "*"]))
def test_any_points_make_so_many_lines_of_at_most_that_width(points, width, height, mark) -> None:
    lines = chart(points, width=width, height=height, mark=mark)
    assert len(lines) == height and max(map(len, lines)) <= width
    if mark:
        assert "".join(lines).isascii()


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right_without_gaps() -> None:
    lines = chart([(step, 100.0 - step) for step in range(101)], width=49, height=11)
    found = dots(lines[:-1], first_column=9)
    columns = {x for x, _ in found}
    assert columns == set(range(80)) and {y for _, y in found} == set(range(40))
    assert (0, 0) in found and (79, 39) in found
    assert all(abs(y - x * 39 / 79) <= 1 for x, y in found)
    assert lines[0].split()[0] == "100" and lines[9].split()[0] == "0"
    assert lines[-1].split() == ["step", "0", "100"]


def test_points_far_apart_are_joined_and_points_in_one_column_are_averaged() -> None:
    sparse = dots(chart([(0, 0.0), (1000, 1.0)], width=49, height=11)[:-1], first_column=9)
    assert {x for x, _ in sparse} == set(range(80))
    zigzag = [(step, float(step % 2)) for step in range(16_000)]  # 200 steps a column
    lines = chart([(0, -1.0), *zigzag, (16_000, 2.0)], width=49, height=11)
    middle = {y for x, y in dots(lines[:-1], first_column=9) if 5 < x < 75}
    assert max(middle) - min(middle) <= 1


@pytest.mark.parametrize("values", [[1.0], [3.0, 3.0], [math.nan, 2.0, math.inf], [1e308, -1e308], [5e-324, 0.0]])
def test_one_value_and_extremes_are_drawn(values: list[float]) -> None:
    lines = chart(list(enumerate(values)), width=40, height=6)
    assert dots(lines[:-1], first_column=9)


@pytest.mark.parametrize("points", [[], [(1, math.nan)]])
def test_without_values_it_says_so(points: list[tuple[int, float]]) -> None:
    lines = chart(points, width=40, height=6)
    assert "no values" in lines[0] and len(lines) == 6


def test_a_bar_is_full_at_the_end_alone() -> None:
    assert [bar(share, width=10, glyphs="ascii").count("#") for share in (-1, 0, 0.05, 0.5, 0.9999, 1, 2)] == [
        *(0, 0, 0, 5, 9, 10, 10)
    ]


def test_marks_tell_curves_apart_and_one_without_values_keeps_its_own() -> None:
    steps = list(range(1, 11))
    curves = [(steps, steps), (steps, [math.nan] * 10), (steps, [-step for step in steps])]
    lines = draw_curves(curves, width=60, height=8, marks="AxB", x_name="images")
    assert all(len(line) <= 60 for line in lines) and "x" not in "".join(lines)
    assert "A" in lines[0] and "B" in lines[6] and lines[0].rindex("A") > 50
