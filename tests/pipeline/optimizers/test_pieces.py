"""Few operations however deep the model, nothing read; the same bits however tensors are joined, cut or resumed."""

import copy
import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardvit.launch.bench.operations import Operations, count
from shardvit.model.config import ModelConfig
from shardvit.model.vit import build_model
from shardvit.pipeline.optimizers import pieces
from shardvit.pipeline.optimizers.flat import FlatOptimizer, FlatPiece, GradientVerdict
from shardvit.pipeline.optimizers.muon import orthogonalised
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from tests.rates import set_lr

KINDS: dict[str, dict[str, Any]] = {
    "adamw bf16": {"name": "adamw", "first_moment": "bf16"},
    "sgd": {"name": "sgd"},
    "sgd bf16": {"name": "sgd", "first_moment": "bf16"},
    "adafactor": {"name": "adafactor"},
    "lamb": {"name": "lamb"},
    "muon": {"name": "muon"},
}
# Of 24 blocks' 296 tensors; the rest of an engine's step takes 30. torch's and timm's took 3,300 to 5,300.
OPERATIONS = {"adamw bf16": 15, "sgd": 9, "sgd bf16": 12, "adafactor": 175, "lamb": 69, "muon": 142}

_META = torch.library.Library("aten", "IMPL")
_META.impl("_fused_sgd_", lambda *inputs, **more: None, "Meta")  # torch has none; it has for AdamW

VECTOR = 16  # torch's AdamW rounds the rest of a tensor, below this many elements, differently on a CPU


def config_of(name: str, **keys: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 0.02, "weight_decay": 0.1, **KINDS[name], **keys})


def vit(*, depth: int = 2, width: int = 64) -> nn.Module:
    torch.manual_seed(5)
    config = ModelConfig(width=width, depth=depth, heads=2, patch_size=4)
    return build_model(config, image_size=8, num_classes=16, head="linear")


def verdict(*, skip: bool = False) -> GradientVerdict:
    return GradientVerdict(skip=torch.tensor(float(skip)), divisor=torch.tensor(1.7))


def advance(model: nn.Module, optimizer: Any, steps: range, *, judged: bool = True) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        set_lr(optimizer.param_groups, 0.02 / (1 + step))
        if judged:
            optimizer.found_inf, optimizer.grad_scale = verdict()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for key, value in optimizer.state[parameter].items():
            yield f"{key} of {name}", value


def assert_same(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    left, right = dict(everything(*one)), dict(everything(*other))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("layer_decay", [1.0, 0.75])
@pytest.mark.parametrize("name", KINDS)
def test_twenty_four_blocks_take_few_operations_and_read_nothing(name: str, layer_decay: float) -> None:
    model = vit(depth=24).to("meta")  # stands for a GPU, and has no values to read
    optimizer: Any = build_optimizer(model, config_of(name, layer_decay=layer_decay))
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.found_inf, optimizer.grad_scale = (torch.empty((), device="meta") for _ in range(2))
    optimizer.step()  # makes the moments
    counted = count(optimizer.step)
    assert counted.total <= OPERATIONS[name] and not counted.waits
    assert all(each.is_meta for state in optimizer.state.values() for each in state.values())


class Largest(TorchDispatchMode):
    """The most elements of a new tensor."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("name", KINDS)
def test_temporaries_do_not_grow_with_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a tensor that cannot be cut."""
    monkeypatch.setattr(pieces, "CHUNK_ELEMENTS", 4 * 32 * 32)  # of the largest kernel
    model = vit(depth=6, width=32)
    optimizer = build_optimizer(model, config_of(name))
    advance(model, optimizer, range(1))
    with Largest() as largest:
        optimizer.step()
    assert largest.elements == pieces.CHUNK_ELEMENTS


@pytest.mark.parametrize("name", KINDS)
def test_bits_depend_neither_on_what_is_joined_nor_on_the_number_of_groups(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few elements, stacks of one tensor, each tensor in a group of its own."""
    results = []
    small = 3 * VECTOR
    for chunk in (pieces.CHUNK_ELEMENTS, small):
        monkeypatch.setattr(pieces, "CHUNK_ELEMENTS", chunk)
        model = vit(width=32)
        optimizer = build_optimizer(model, config_of(name))
        if chunk == small:
            optimizer.param_groups = [_alone(group, n) for group in optimizer.param_groups for n in _numbers(group)]
        advance(model, optimizer, range(4))
        results.append((model, optimizer))
    assert_same(*results)


def _numbers(group: dict[str, Any]) -> range:
    return range(len(group["params"]))


def _alone(group: dict[str, Any], number: int) -> dict[str, Any]:
    lists = {key: [group[key][number]] for key in ("params", "param_names", "parts", "shapes") if key in group}
    return {**group, **lists}


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_that_is_skipped_is_as_if_it_had_not_been(name: str, steps_before: int) -> None:
    results = []
    for skips in (False, True):
        model = vit(width=32)
        optimizer: Any = build_optimizer(model, config_of(name))
        advance(model, optimizer, range(steps_before))
        if skips:
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, torch.nan if number % 2 else torch.inf)
            optimizer.found_inf, optimizer.grad_scale = verdict(skip=True)
            optimizer.grad_scale.fill_(torch.nan)
            optimizer.step()
        advance(model, optimizer, range(steps_before, 5))
        results.append((model, optimizer))
    assert_same(*results)


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_state_goes_on_to_the_last_bit(name: str) -> None:
    model = vit(width=32)
    optimizer = build_optimizer(model, config_of(name))
    advance(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    resumed = build_optimizer(other, config_of(name))
    resumed.load_state_dict(torch.load(file))
    assert_same((model, optimizer), (other, resumed))
    for each in ((model, optimizer), (other, resumed)):
        advance(*each, range(3, 6))
    assert_same((model, optimizer), (other, resumed))


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_a_state_that_timms_wrote_goes_on(name: str) -> None:
    """Earlier checkpoints: LAMB's steps are in the groups, on the CPU, and Muon's state says which tensors it moves."""
    model = vit(width=32)
    if name == "lamb":  # where timm has one trust ratio as well
        model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 3))
    config = config_of(name)
    groups: Any = parameter_groups(model, config)
    for group in groups:
        adapts, _ = group.pop("adapts", None), group.pop("parts", None)
        if name == "lamb":
            group["always_adapt"] = adapts
        else:
            group |= {"nesterov": True, "eps": 1e-7} if group.pop("orthogonal") else {"use_fallback": True, "eps": 1e-8}
    make: Any = timm.optim.Lamb if name == "lamb" else timm.optim.Muon
    own_keys: dict[str, dict[str, Any]] = {
        "lamb": {"max_grad_norm": None, "eps": 1e-6},
        "muon": {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95, "ns_coefficients": "original"},
    }
    theirs = make(groups, lr=0.02, betas=config.betas, **own_keys[name])
    advance(model, theirs, range(3), judged=False)
    other = copy.deepcopy(model)
    ours = build_optimizer(other, config)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for each in ((model, theirs), (other, ours)):
        advance(*each, range(3, 8), judged=False)
    for (key, expected), (_, tensor) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6, msg=key)
    assert {float(state["step"]) for state in ours.state.values() if "step" in state} == {8.0}
    assert not any("use_fallback" in group or "always_adapt" in group for group in ours.param_groups)


def test_adafactors_earlier_states_have_flaxs_shapes() -> None:
    """Of biases: which of q, k and v, heads, channels."""
    model = vit(width=32)
    optimizer = build_optimizer(model, config_of("adafactor"))
    advance(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    earlier = [state for state in saved["state"].values() if state["exp_avg"].shape == (3 * 32,)]
    for state in earlier:
        state["exp_avg_sq"] = state["exp_avg_sq"].view(3, 2, 16)
    assert len(earlier) == 2
    other = copy.deepcopy(model)
    resumed = build_optimizer(other, config_of("adafactor"))
    resumed.load_state_dict(saved)
    for each in ((model, optimizer), (other, resumed)):
        advance(*each, range(3, 6))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_only_what_has_a_gradient_counts_a_step() -> None:
    """DeepSpeed's ZeRO 3 steps one group at a time."""
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = build_optimizer(nn.ParameterDict({"first": first, "second": second}), config_of("adamw bf16"))
    for moved, rest in ((first, second), (second, first), (first, second)):
        moved.grad, rest.grad = torch.ones(3), None
        optimizer.step()
    assert [float(optimizer.state[each]["step"]) for each in (first, second)] == [2.0, 1.0]


def flat_of(
    model: nn.Module, config: OptimizerConfig, *, cuts: list[int], judge: Any
) -> tuple[list[Any], list[Tensor], int]:
    """ZeRO 1's optimizers of several ranks, each of a piece of the flattened model."""
    named = [pair for group in parameter_groups(model, config) for pair in group["params"]]
    whole = torch.cat([parameter.detach().flatten() for _, parameter in named])
    optimizers, masters = [], []
    for first, last in pairwise([0, *cuts, whole.numel()]):
        optimizer = FlatOptimizer(parameter_groups(model, config), config, buckets=[named], judge=judge)
        master = nn.Parameter(whole[first:last].clone())
        optimizer.param_groups[0]["params"] = [master]
        start, places = 0, {}
        for name, parameter in named:
            left, right = max(start, first), min(start + parameter.numel(), last)
            if left < right:
                places[name] = FlatPiece(0, left - first, right - left)
            start += parameter.numel()
        optimizer.place(places)
        optimizers.append(optimizer)
        masters.append(master)
    return optimizers, masters, whole.numel()


@pytest.mark.parametrize(
    "kind",
    [{"name": "adamw"}, KINDS["adamw bf16"], {"name": "sgd"}, {"name": "sgd", "momentum": 0.0}, KINDS["sgd bf16"]],
    ids=lambda kind: " ".join(map(str, kind.values())),
)
def test_layer_decay_of_a_flat_piece_takes_few_operations_and_the_same_bits_for_every_cut(kind: dict[str, Any]) -> None:
    model = vit(depth=24)
    config = OptimizerConfig(lr=0.02, weight_decay=0.1, layer_decay=0.75, **kind)
    results = []
    given = verdict()
    for cuts in ([], [63 * VECTOR, 2501 * VECTOR, 43_751 * VECTOR]):
        optimizers, masters, size = flat_of(model, config, cuts=cuts, judge=lambda gradient: given)
        counts = [Operations() for _ in optimizers]
        for step in range(3):
            gradient = torch.randn(size, generator=torch.Generator().manual_seed(step))
            parts = gradient.split([each.numel() for each in masters])
            for optimizer, part, counted in zip(optimizers, parts, counts, strict=True):
                part = part.clone()
                set_lr(optimizer.param_groups, 0.02)
                if step < 2:
                    optimizer.step_by(part)
                    continue
                with counted:
                    optimizer.step_by(part)
        assert all(each.total <= 18 and not each.waits for each in counts)  # the rest of the engine's step takes 20
        results.append(torch.cat([master.detach() for master in masters]))
    assert torch.equal(*results)


def test_orthogonal_matrices_are_timms() -> None:
    from timm.optim.muon import zeropower_via_newtonschulz

    for shape in ((3, 24, 8), (3, 8, 24), (1, 5, 5)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        theirs = [zeropower_via_newtonschulz(each, 5, [(3.4445, -4.7750, 2.0315)]) for each in matrices]
        torch.testing.assert_close(orthogonalised(matrices).float(), torch.stack(theirs).float(), rtol=0, atol=0.02)
    assert not orthogonalised(torch.zeros(2, 3, 4)).any()
