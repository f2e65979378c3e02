"""LAMB and Muon under ZeRO 1 and 2, on 1, 2 and 4 processes: the laws are those of whole tensors.

Given the same gradients, pieces move as whole tensors do, to float32's rounding (`Net`). In training, gradients differ
in their last bits by how ranks add them up. LAMB's float32 losses then stay within 1e-5. Muon rounds to bf16 before it
orthogonalises, and where that falls to the other side, weights differ by 1/256 of their step.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import timm.optim
import torch

from shardvit.pipeline.engine.saved_state.frozen import freeze
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from tests.rates import set_lr
from tests.workers import run_ranks

WORKER = Path(__file__).with_name("whole_tensors_worker.py")
_spec = importlib.util.spec_from_file_location("whole_tensors_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
sys.modules["whole_tensors_worker"] = worker  # dataclasses look their module up
_spec.loader.exec_module(worker)

SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
LOSS = {("lamb", "fp32"): 1e-5, ("muon", "fp32"): 1e-3, ("lamb", "bf16"): 0.05, ("muon", "bf16"): 0.05}
WAY = {("lamb", "fp32"): 1e-4, ("muon", "fp32"): 0.02, ("lamb", "bf16"): 0.15, ("muon", "bf16"): 0.15}


@pytest.fixture(scope="module", params=SIZES, ids=lambda world: f"{world} processes")
def results(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole_tensors")
    run_ranks(WORKER, out, world_size=request.param)
    return {"world": request.param, **torch.load(out / "results.pt", weights_only=False)}


def whole(model, name, more):
    """LAMB of whole tensors, whose oracle is optax's; timm's own Muon, and torch's AdamW."""
    config = worker.config_of(name, more)
    if name == "lamb":
        return [build_optimizer(model, config)]
    matrices, others = (
        [{**group, "params": [each for _, each in group["params"]]} for group in groups]
        for groups in (
            [group for group in parameter_groups(model, config) if group["orthogonal"] is kind]
            for kind in (True, False)
        )
    )
    known = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "original"}
    return [timm.optim.Muon(matrices, lr=config.lr, **known), torch.optim.AdamW(others, lr=config.lr)]


def plain_steps(model, name, more, gradients_of):
    """Steps of whole tensors by the gradients that `gradients_of(step)` leaves on them."""
    optimizers = whole(model, name, more)
    for step in range(worker.STEPS):
        model.zero_grad()
        gradients_of(step)
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], worker.CLIP)
        if norm.isfinite():
            for optimizer in optimizers:
                set_lr(optimizer.param_groups, worker.lr_at(step))
                optimizer.step()


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_the_same_gradients_move_pieces_as_whole_tensors(name, results):
    model = worker.Net()

    def given(step):
        for key, made in worker.made_gradients(model, step).items():
            model.get_parameter(key).grad = made

    start = {key: each.detach().clone() for key, each in model.named_parameters()}
    plain_steps(model, name, {}, given)
    for key, each in model.named_parameters():
        assert (each - start[key]).abs().max() > 1e-3
        assert torch.allclose(results[name][key].view_as(each), each, rtol=1e-5, atol=1e-6), key


@pytest.fixture(scope="module")
def oracle():
    """The same steps of the same model in one process, in float32, with nothing of the engines."""
    known = {}

    def of(case):
        key = case.name, bool(case.more)
        if key not in known:
            model = worker.common.build_model(worker.recipe_for(case))
            freeze(model, case.more.get("frozen", ()), key="optimizer.frozen")
            start, rows = {one: each.clone() for one, each in model.state_dict().items()}, []

            def given(step):
                images, labels = worker.common.batch(step)
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss = loss * float("nan") if step == worker.POISONED else loss
                loss.backward()
                rows.append(loss.item())

            plain_steps(model, *key[:1], case.more, given)
            known[key] = {"losses": rows, "start": start, "weights": model.state_dict()}
        return known[key]

    return of


def without_key_bias(weights):
    """Softmax ignores a bias of the keys: its true gradient is zero, and Adam blows up the rounding that is left."""
    parts = []
    for name, tensor in sorted(weights.items()):
        query, _, value = tensor.chunk(3) if name.endswith("attn.qkv.bias") else (tensor, None, tensor[:0])
        parts += [query.flatten(), value.flatten()]
    return torch.cat(parts)


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_training_equals_that_of_whole_tensors(case, results, oracle):
    ours, theirs, kind = results[str(case)], oracle(case), (case.name, case.precision)
    assert [row["applied"] for row in ours["rows"]] == [step != worker.POISONED for step in range(worker.STEPS)]
    assert ours["moved_by_nan"] == []
    for step, (row, loss) in enumerate(zip(ours["rows"], theirs["losses"], strict=True)):
        assert step == worker.POISONED or row["loss"] == pytest.approx(loss, rel=LOSS[kind])
    mine, others, start = (without_key_bias(each) for each in (ours["weights"], theirs["weights"], theirs["start"]))
    assert (mine - others).norm() < WAY[kind] * (others - start).norm()


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_going_on_from_a_checkpoint_is_the_same_to_the_last_bit(case, results):
    ours = results[str(case)]
    assert ours["resumed_rows"] == ours["rows"][worker.SAVED :]
    for name, tensor in ours["weights"].items():
        assert torch.equal(tensor, ours["resumed_weights"][name]), name


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_each_process_keeps_its_equal_part_of_the_state(name, results):
    """Muon's matrices have one moment, not AdamW's two besides."""
    (whole_bytes, *_), *others = (
        results[str(case)]["state_bytes"] for case in worker.CASES if case.name == name and not case.more
    )
    for each in others:
        assert max(each) <= whole_bytes / results["world"] + 400  # padding, and each bucket's counter
