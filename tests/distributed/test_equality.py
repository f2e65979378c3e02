"""Every way to train is the same training: 20 steps on two ranks, against plain torch on one process.

The same global batches of 16 images, AdamW with two settings of weight decay, clipped; one step has a NaN on one rank.
Whatever is chosen (ZeRO stage, accumulation, overlap, size of buckets, activation checkpointing, offload, compiled
blocks), float32 losses agree to a relative 1e-5 and weights to an absolute 1e-5, and bf16 stays within the bounds
below. `SOME` of the combinations run always, all of them as slow tests.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tests.workers import run_ranks

WORKER = Path(__file__).with_name("equality_worker.py")
_spec = importlib.util.spec_from_file_location("equality_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
sys.modules["equality_worker"] = worker  # dataclasses look their module up
_spec.loader.exec_module(worker)

# bf16 rounds what it computes with to 1/256: how far a loss may be off, and a weight, as a share of the way it moved.
BF16_LOSS, BF16_WAY = 0.05, 0.15

pytestmark = pytest.mark.parametrize(
    ("which", "case"),
    [
        pytest.param(which, case, marks=[pytest.mark.slow] if which != "some" else [], id=f"{which}: {case}")
        for which, cases in worker.CASES.items()
        for case in cases
    ],
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the ranks computed; one start of them serves all cases of a list."""
    known = {}

    def of(which, case):
        if which not in known:
            out = tmp_path_factory.mktemp(which)
            (out / "which").write_text(which, encoding="utf-8")
            run_ranks(WORKER, out, world_size=2)
            known[which] = torch.load(out / "results.pt", weights_only=False)
        return known[which][str(case)]

    return of


@pytest.fixture(scope="module")
def oracle():
    """The same 20 steps with nothing but torch."""
    model = worker.common.build_model(worker.recipe_for(worker.Case(0)))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kernels = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    others = [p for p in model.parameters() if all(p is not kernel for kernel in kernels)]
    optimizer = torch.optim.AdamW([{"params": kernels, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    rows = []
    for step in range(worker.STEPS):
        if step == worker.POISONED:
            rows.append({"applied": False})
            continue
        images, labels = worker.common.batch(step)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = worker.lr_at(step)
        optimizer.step()
        rows.append({"applied": True, "loss": loss.item(), "grad_norm": norm.item()})
    assert max(row["grad_norm"] for row in rows if row["applied"]) > 1.0, "nothing was clipped"
    return {"rows": rows, "start": start, "weights": model.state_dict()}


def without_key_bias(weights):
    """Softmax ignores a bias of the keys: its true gradient is zero, and Adam blows up the rounding that is left."""
    parts = {}
    for name, tensor in weights.items():
        query, _, value = tensor.chunk(3) if name.endswith("attn.qkv.bias") else (tensor, None, tensor[:0])
        parts[name] = torch.cat([query, value])
    return parts


def flat(weights):
    return torch.cat([tensor.flatten() for _, tensor in sorted(without_key_bias(weights).items())])


def test_20_steps_equal_plain_torchs_and_a_nan_is_skipped(which, case, results, oracle):
    ours, theirs = results(which, case), oracle["rows"]
    assert [row["applied"] for row in ours["rows"]] == [row["applied"] for row in theirs]
    assert ours["moved_by_nan"] == []
    pairs = [(mine, other) for mine, other in zip(ours["rows"], theirs, strict=True) if other["applied"]]
    mine, others = flat(ours["weights"]), flat(oracle["weights"])
    way = (others - flat(oracle["start"])).norm()
    if case.precision == "fp32":
        for row, other in pairs:
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert (mine - others).abs().max() < 1e-5
        assert way > 100 * (mine - others).norm()
    else:
        for row, other in pairs:
            assert row["loss"] == pytest.approx(other["loss"], abs=BF16_LOSS)
        assert (mine - others).norm() < BF16_WAY * way


def test_going_on_from_a_checkpoint_is_the_same_to_the_last_bit(which, case, results):
    ours = results(which, case)
    assert ours["resumed_rows"] == ours["rows"][worker.SAVED :]
    for name, tensor in ours["weights"].items():
        assert torch.equal(tensor, ours["resumed_weights"][name]), name
