"""Every engine in every precision trains as plain torch does in float32 on the CPU."""

import pytest

from shardvit.pipeline.ranks.group import Ranks
from tests.gpu.twenty_steps import ENGINES, STEPS, TOLERANCES, difference, opened, plain, recipe_for

pytestmark = pytest.mark.gpu
CASES = [(engine, precision) for engine in ENGINES for precision in ("fp32", "bf16", "fp16")] + [("ZeRO 1", "tf32")]


@pytest.mark.parametrize(("engine", "precision"), CASES, ids=[", ".join(case) for case in CASES])
def test_20_steps_are_those_of_plain_torch(engine, precision, ranks: Ranks, device, record_property):
    if precision in ("fp16", "tf32") and device.type == "cpu":
        pytest.skip(f"{precision} is for GPUs")
    kind = {"precision": "fp32", "fp32_matmul": "tf32"} if precision == "tf32" else {"precision": precision}
    recipe = recipe_for({**ENGINES[engine], **kind})
    with opened(recipe, ranks=ranks) as training:
        rows = training.run(range(STEPS))
    applied = [row.outcome.applied for row in rows]
    # fp16 skips steps while it looks for its loss scale.
    assert all(applied) or (precision == "fp16" and sum(applied) > STEPS / 2)
    found = difference(rows, plain(recipe, applied=applied))
    record_property("difference", f"{found:.1e}, bound {TOLERANCES[precision]:.0e}")
    assert found <= TOLERANCES[precision]
