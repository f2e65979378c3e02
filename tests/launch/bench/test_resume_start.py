"""The report of the start-up bench: the ratio is taken within each round, and a missed target is said."""

import pytest

from launch.bench.resume_start import report


@pytest.mark.parametrize(
    ("resumed", "said"),
    [((12.0, 26.0, 14.0), "1.30, target 1.5: met"), ((16.0, 40.0, 17.0), "1.70, target 1.5: MISSED")],
)
def test_the_median_ratio_is_held_against_the_target(resumed: tuple[float, ...], said: str):
    text = "\n".join(report((10.0, 20.0, 10.0), resumed, overrides=["model.width=96"], checkpoint_bytes=2**21))
    assert said in text and "recipe digits model.width=96: 2 processes, checkpoint of 2.0 MiB, 3 rounds" in text
