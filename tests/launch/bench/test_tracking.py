"""The bench of tracking adds up as it says, and misses its target aloud."""

import pytest

from shardvit.launch.bench.tracking import Costs, report

COSTS = Costs(
    calls={"training accuracy": 100, "step's clock": 100, "point of the curve": 10, "norms": 10},
    seconds={"training accuracy": 0.1, "step's clock": 0.1, "point of the curve": 0.04, "norms": 0.06},
    draw_and_send=7.0,
    training=100.3,
    training_wall=210.8,
    steps=100,
)


def test_what_comes_each_point_is_shared_among_the_steps_between_two() -> None:
    assert COSTS.step == pytest.approx(1.0)
    each_step, each_point = 0.001 + 0.001, 0.004 + 0.006
    assert COSTS.looking(log_steps=20) == pytest.approx(each_step + each_point / 20)
    assert COSTS.looking(log_steps=1) == pytest.approx(each_step + each_point)


@pytest.mark.parametrize(("training", "missed"), [(100.3, False), (1.3, True)])
def test_a_missed_target_is_said(training: float, missed: bool) -> None:
    costs = Costs(**{**vars(COSTS), "training": training})
    text = "\n".join(report(costs))
    assert ("MISSED" in text) is missed
    assert "7.0 s" in text
