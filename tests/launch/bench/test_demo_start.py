"""The report of the demo's bench: the ratio is taken within each round, and a missed target is said."""

import pytest

from shardvit.launch.bench.demo_start import Waits, report


@pytest.mark.parametrize(
    ("steps", "said"),
    [((5.0, 30.0, 5.0), "first step 0.50, end 1.00"), ((6.0, 9.0, 6.0), "first step 0.60")],
)
def test_the_first_step_is_held_against_the_target(steps: tuple[float, ...], said: str):
    before = [Waits(1.0, step, 100.0) for step in (10.0, 20.0, 10.0)]
    now = [Waits(1.0, step, 100.0) for step in steps]
    text = "\n".join(report({"before": before, "now": now}))
    assert said in text
    assert ("target 0.5: met" in text) == (steps[0] <= 5.0)
    assert "10.00 (10.00 to 20.00)" in text and "3 rounds" in text
    assert "target" not in "\n".join(report({"now": now}))
