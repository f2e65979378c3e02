"""The moving average of the weights: torch's, optax's and timm's laws, and an exchange that leaves no trace."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import optax
import pytest
import torch
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardvit.launch.bench.operations import Operations
from shardvit.pipeline.engine.saved_state import average as average_module
from shardvit.pipeline.engine.saved_state.average import WeightAverage, decay_at
from shardvit.pipeline.recipe.stages.train_stage import EmaConfig

STEPS = 50
APPLIED = torch.tensor(1.0)


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))


def masters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def walk(model: torch.nn.Module, *, seed: int) -> None:
    """Moves the weights in place, as an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def averages(average: WeightAverage) -> dict[str, torch.Tensor]:
    return average.state()["averages"]


@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_fifty_steps_are_torchs_optaxs_and_the_definitions(decay: float) -> None:
    model = model_of()
    ours = WeightAverage(masters_of(model), config=EmaConfig(decay=decay))
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    torchs.update_parameters(model)  # its first one copies: as ours, it begins from the initial weights
    start = {name: tensor.detach().clone() for name, tensor in masters_of(model).items()}
    optaxs = {name: tensor.numpy() for name, tensor in start.items()}
    transform = optax.ema(decay, debias=False)
    state = transform.init({name: tensor.numpy() for name, tensor in start.items()})
    defined = {name: tensor.double() for name, tensor in start.items()}
    moved: Any = {}
    for step in range(STEPS):
        walk(model, seed=step)
        ours.update(applied=APPLIED)
        torchs.update_parameters(model)
        now = {name: tensor.detach().numpy().copy() for name, tensor in masters_of(model).items()}
        optaxs = optax.incremental_update(now, optaxs, step_size=1 - decay)
        # optax.ema begins at zero: the average of what was added since the start.
        moved, state = transform.update({name: now[name] - start[name].numpy() for name in now}, state)
        defined = {name: decay * old + (1 - decay) * torch.from_numpy(now[name]) for name, old in defined.items()}
    assert ours.updates == STEPS
    for name, found in averages(ours).items():
        assert torch.equal(found, dict(torchs.module.named_parameters())[name])
        for expected in (optaxs[name], moved[name] + start[name].numpy(), defined[name]):
            assert torch.allclose(found.double(), torch.as_tensor(expected).double(), rtol=1e-6, atol=2e-6)
        assert (found - masters_of(model)[name]).abs().max() > 0.1, "it is no average"


@pytest.mark.parametrize("warmup", ["none", "timm", "tensorflow"])
def test_a_skipped_step_moves_nothing_and_is_not_counted(warmup: Any) -> None:
    config, model = EmaConfig(decay=0.9, warmup=warmup), model_of()
    ours, without = WeightAverage(masters_of(model), config=config), WeightAverage(masters_of(model), config=config)
    for step in range(STEPS):
        skipped = step % 5 in (0, 3)
        if not skipped:
            walk(model, seed=step)
            without.update(applied=APPLIED)
        ours.update(applied=torch.tensor(0.0 if skipped else 1.0))
    assert ours.updates == without.updates == STEPS * 3 // 5
    for name, found in averages(ours).items():
        assert torch.equal(found, averages(without)[name])


def test_no_update_comes_to_the_host() -> None:
    average = WeightAverage(masters_of(model_of()), config=EmaConfig(decay=0.9, warmup="timm"))
    with Operations() as counted:
        average.update(applied=APPLIED)
    assert not counted.waits


def test_the_warm_up_is_timms_and_tensorflows() -> None:
    timms = ModelEmaV3(model_of(), decay=0.95, use_warmup=True)
    config = EmaConfig(decay=0.95, warmup="timm")
    found = [decay_at(n, config=config) for n in range(200)]
    assert found == pytest.approx([timms.get_decay(n + 1) for n in range(200)])  # it counts the update itself
    assert found[0] == 0 and found[-1] == 0.95
    # min(decay, (1 + num_updates) / (10 + num_updates)): TensorFlow's documentation
    config = EmaConfig(decay=0.95, warmup="tensorflow")
    assert [decay_at(n, config=config) for n in (0, 8, 10**6)] == pytest.approx([0.1, 0.5, 0.95])
    assert {decay_at(n, config=EmaConfig(decay=0.95)) for n in range(5)} == {0.95}


@pytest.mark.parametrize(
    ("version", "warmup"), [(ModelEma, "none"), (ModelEmaV2, "none"), (ModelEmaV3, "none"), (ModelEmaV3, "timm")]
)
def test_fifty_steps_are_timms(version: Callable[..., Any], warmup: Literal["none", "timm"]) -> None:
    """DeiT takes the first version; timm's training script the third, its warm-up by an option."""
    model = model_of()
    ours = WeightAverage(masters_of(model), config=EmaConfig(decay=0.9, warmup=warmup))
    timms = version(model, decay=0.9, **({"use_warmup": True} if warmup == "timm" else {}))
    for step in range(STEPS):
        walk(model, seed=step)
        ours.update(applied=APPLIED)
        timms.update(model, **({"step": step + 1} if warmup == "timm" else {}))
    theirs = dict((timms.ema if version is ModelEma else timms.module).named_parameters())
    for name, found in averages(ours).items():
        assert torch.allclose(found, theirs[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("elements", [1, 4, 1 << 24])
def test_an_exchange_is_undone_by_another_to_the_last_bit(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average_module, "_EXCHANGED_ELEMENTS", elements)
    model = model_of()
    average = WeightAverage(masters_of(model), config=EmaConfig(decay=0.9))
    walk(model, seed=1)
    average.update(applied=APPLIED)
    before = copy.deepcopy((model.state_dict(), averages(average)))
    average.exchange()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[1][name]) and torch.equal(averages(average)[name], before[0][name])
        assert not torch.equal(tensor, before[0][name])
    average.exchange()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name]) and torch.equal(averages(average)[name], before[1][name])
