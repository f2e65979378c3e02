"""Each optimizer moves weights on a device, fused and flat, as its plain form does on the CPU."""

from typing import Any

import pytest

from shardvit.pipeline.ranks.group import Ranks
from tests.gpu.twenty_steps import STEPS, TOLERANCES, difference, opened, plain, recipe_for

pytestmark = pytest.mark.gpu
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"name": "adamw"},
    "AdamW, layer decay": {"name": "adamw", "layer_decay": 0.9, "head_lr_factor": 2.0},
    "AdamW, bf16 moment": {"name": "adamw", "first_moment": "bf16"},
    "SGD": {"name": "sgd", "lr": 0.1},
    "SGD, bf16 momentum": {"name": "sgd", "lr": 0.1, "first_moment": "bf16"},
    "LAMB": {"name": "lamb", "lr": 0.01},
    "Muon": {"name": "muon", "lr": 0.01},
    "Adafactor": {"name": "adafactor"},
}
CASES = [
    (name, stage, precision)
    for name, keys in OPTIMIZERS.items()
    for stage, precision in ((0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"))
    if not (keys["name"] == "adafactor" and stage) and not (keys["name"] in ("lamb", "muon") and stage == 3)
]


@pytest.mark.parametrize(("name", "stage", "precision"), CASES, ids=[f"{a}, ZeRO {b}, {c}" for a, b, c in CASES])
def test_20_steps_are_those_on_the_cpu(name, stage, precision, ranks: Ranks, device, record_property):
    recipe = recipe_for({"zero_stage": stage, "precision": precision}, optimizer=OPTIMIZERS[name])
    with opened(recipe, ranks=ranks) as training:
        rows = training.run(range(STEPS))
    # A moment kept in bf16 rounds, and so does Muon's iteration, whatever the weights are.
    rounds = "bf16" in name or name in ("Muon", "Adafactor")
    found, most = difference(rows, plain_of(name)), TOLERANCES["bf16" if rounds else precision]
    record_property("difference", f"{found:.1e}, bound {most:.0e}")
    assert all(row.outcome.applied for row in rows) and found <= most


def plain_of(name: str) -> Any:
    return plain(recipe_for({"zero_stage": 0}, optimizer=OPTIMIZERS[name]))
