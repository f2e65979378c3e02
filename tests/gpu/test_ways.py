"""What should change speed and memory alone changes nothing else: overlap, offload, compiled blocks, attention kernels.

Then what changes the step: clipping, steps with a NaN, averages of the weights.
"""

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shardvit.pipeline.kernels.attention import AttentionCase, order_of
from shardvit.pipeline.ranks.group import Ranks
from tests.gpu.twenty_steps import (
    ENGINES,
    MODEL,
    SIZE,
    STEPS,
    TOLERANCES,
    difference,
    opened,
    plain,
    recipe_for,
    same_bits,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the compiler warns of itself
WAYS: dict[str, dict[str, Any]] = {
    **{
        f"ZeRO {stage}, overlap {overlap}": {"zero_stage": stage, "overlap": overlap, "bucket_elements": 60_000}
        for stage in (1, 2)
        for overlap in ("on", "off")
    },
    "ZeRO 1, bf16, overlap on": {"precision": "bf16", "overlap": "on", "bucket_elements": 60_000},
    **{f"ZeRO {stage}, offload": {"zero_stage": stage, "offload": "optimizer"} for stage in (1, 2, 3)},
    "ZeRO 1, bf16, offload": {"precision": "bf16", "offload": "optimizer"},
    "ZeRO 3, offload with parameters": {"zero_stage": 3, "offload": "optimizer_and_parameters"},
    **{f"ZeRO {stage}, checkpointed": {"zero_stage": stage, "activation_checkpointing": True} for stage in (0, 1, 3)},
    "ZeRO 1, every 2nd block checkpointed": {"activation_checkpointing": 2},
    "ZeRO 1, kernels that need not repeat their bits": {"deterministic": "off"},
    **{
        f"ZeRO {stage}, {precision}, compiled": {"zero_stage": stage, "precision": precision, "compile": "blocks"}
        for stage, precision in ((0, "bf16"), (1, "fp32"), (1, "bf16"), (2, "bf16"))
    },
    "ZeRO 1, compiled and checkpointed": {"compile": "blocks", "activation_checkpointing": True},
    "accelerate, compiled": {**ENGINES["accelerate"], "compile": "blocks"},
}


@pytest.mark.parametrize("accumulation", [1, 2], ids=["whole batch", "2 micro-batches"])
@pytest.mark.parametrize("way", WAYS)
def test_20_steps_are_those_of_plain_torch(way, accumulation, ranks: Ranks, device, record_property):
    if accumulation > 1 and "compile" in WAYS[way]:
        pytest.skip("covered with the whole batch: compiling takes long")
    recipe = recipe_for(WAYS[way], accumulation=accumulation)
    with opened(recipe, ranks=ranks) as training:
        rows = training.run(range(STEPS))
        compiled = training.kernels.compiled
        assert (len(compiled.graphs) > 0) if compiled else "compile" not in WAYS[way]
    found, most = difference(rows, plain(recipe)), TOLERANCES[recipe.engine.precision]
    record_property("difference", f"{found:.1e}, bound {most:.0e}")
    assert all(row.outcome.applied for row in rows) and found <= most


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kernel", ["auto", "cudnn", "flash", "efficient", "math"])
def test_attention_on_each_kernel(kernel, precision, ranks: Ranks, device, record_property):
    if precision == "fp16" and device.type == "cpu":
        pytest.skip("fp16 is for GPUs")
    on_gpu, heads = device.type == "cuda", int(MODEL["heads"])
    case = AttentionCase(
        "cuda" if on_gpu else "cpu",
        precision,
        heads=heads,
        head_size=int(MODEL["width"]) // heads,
        tokens=(SIZE // int(MODEL["patch_size"])) ** 2 + 1,
        capability=torch.cuda.get_device_capability() if on_gpu else (0, 0),
        cudnn=(torch.backends.cudnn.version() or 0) if on_gpu else 0,
    )
    able = order_of(case)[0]
    if kernel not in ("auto", *able):
        pytest.skip(f"there is none for {case.describe()}")
    recipe = recipe_for({"precision": precision, "attention": kernel})
    with opened(recipe, ranks=ranks) as training:
        rows = training.run(range(STEPS))
        ran = training.kernels.tags["shardvit.attention"]
    assert ran in able if kernel == "auto" else ran == kernel
    applied = [row.outcome.applied for row in rows]
    found = difference(rows, plain(recipe, applied=applied))
    record_property("difference", f"{found:.1e}, bound {TOLERANCES[precision]:.0e}")
    assert found <= TOLERANCES[precision]


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_is_torchs(engine, ranks: Ranks, device):
    recipe = recipe_for(ENGINES[engine], optimizer={"clip_grad_norm": 0.1, "name": "sgd", "lr": 0.5})
    with opened(recipe, ranks=ranks) as training:
        rows = training.run(range(STEPS))
        weights = training.engine.weights()
    reference = plain(recipe)
    unclipped = plain(recipe_for({}, optimizer={"clip_grad_norm": 0, "name": "sgd", "lr": 0.5}))
    norms = [row.outcome.grad_norm for row in rows]
    assert norms == pytest.approx(reference.norms, rel=1e-3) and max(norms) > 0.2
    assert far(weights, reference.weights) < 1e-3 < 1e-2 < far(unclipped.weights, reference.weights)


POISONED = 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_with_a_nan_is_skipped_and_moves_nothing(engine, precision, ranks: Ranks, device):
    recipe = recipe_for({**ENGINES[engine], "precision": precision}, ema={"decay": 0.9})
    with opened(recipe, ranks=ranks) as training:
        rows = training.run(range(POISONED))
        before = held(training)
        rows += training.run([POISONED], poisoned=POISONED)
        assert all(same_bits(one, other) for one, other in zip(held(training), before, strict=True))
        rows += training.run(range(POISONED + 1, STEPS))
    applied = [step != POISONED for step in range(STEPS)]
    assert [row.outcome.applied for row in rows] == applied
    assert difference(rows, plain(recipe, applied=applied)) <= TOLERANCES[precision]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_average_of_the_weights_is_torchs(engine, precision, ranks: Ranks, device):
    recipe, update = recipe_for({**ENGINES[engine], "precision": precision}, ema={"decay": 0.9}), None
    with opened(recipe, ranks=ranks) as training:
        expected = {name: tensor.clone() for name, tensor in training.engine.weights().items()}
        update = get_ema_multi_avg_fn(0.9)

        def average() -> None:
            weights = training.engine.weights()
            update(list(expected.values()), [weights[name] for name in expected], None)

        training.run(range(STEPS), each=average)
        weights, found = held(training)
    assert far(found, expected) < 5e-6 < 1e-4 < far(found, weights)


def held(training: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights and their average, whole."""
    weights = {name: tensor.clone() for name, tensor in training.engine.weights().items()}
    with training.engine.averaged():
        return weights, {name: tensor.clone() for name, tensor in training.engine.weights().items()}


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor.float() - other[name].float()).abs().max()) for name, tensor in one.items())
