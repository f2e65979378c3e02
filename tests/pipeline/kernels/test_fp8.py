"""FP8 products against float64 arithmetic on the values that FP8 can hold; `torch._scaled_mm` runs on CPUs, too."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.kernels.fp8 import Fp8Linear, fp8_product, use_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BITS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}  # mantissa, smallest normal exponent, largest value


def _rounded(values: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """The law in float64: scaled to the format's largest value, to the nearest of its values (ties to even), back."""
    mantissa, smallest, most = BITS[dtype]
    values = values.double()
    largest = values.abs().amax() if dim is None else values.abs().amax(dim=dim, keepdim=True)
    scale = (largest / most).float().double()
    scaled = (values.float() / scale.float()).double()
    exponent = torch.frexp(scaled).exponent.double() - 1
    step = 2.0 ** (exponent.clamp(min=smallest) - mantissa)
    return (scaled / step).round().clamp(-most, most * 2) * step * scale


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape[0], 1, generator=generator).exp()  # rows of different magnitude
    return torch.randn(*shape, generator=generator) * spread


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("left", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("inner", [64, 51], ids=str)
def test_a_product_is_that_of_the_rounded_factors(scaling: str, left: torch.dtype, inner: int) -> None:
    a, b = _random(24, inner, seed=1), _random(inner, 32, seed=2)
    dims = (1, 0) if scaling == "rowwise" else (None, None)
    expected = _rounded(a, left, dims[0]) @ _rounded(b, E4M3, dims[1])
    found = fp8_product(a, b, scaling=scaling, left=left)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    exact = a.double() @ b.double()
    assert (found - exact).norm() / exact.norm() > 1e-3  # it is rounded


def test_rows_of_their_own_scale_round_better() -> None:
    a, b = _random(64, 64, seed=3) * torch.logspace(-5, 0, 64)[:, None], _random(64, 32, seed=4)
    exact = a.double() @ b.double()
    error = {
        kind: ((fp8_product(a, b, scaling=kind) - exact).norm(dim=1) / exact.norm(dim=1)).max()
        for kind in ("tensorwise", "rowwise")
    }
    assert error["rowwise"] < 0.1 < error["tensorwise"]


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_layers_gradients_are_products_of_e5m2_gradients(scaling: Any) -> None:
    layer = nn.Linear(32, 48)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    use_fp8([nn.Sequential(layer)], scaling=scaling, device=torch.device("cpu"))
    assert isinstance(layer, Fp8Linear) and layer.state_dict().keys() == state.keys()
    x = _random(10, 32, seed=5).view(2, 5, 32).requires_grad_()
    outputs = layer(x)
    gradient = _random(10, 48, seed=6).view(2, 5, 48)
    outputs.backward(gradient)
    row, column = (1, 0) if scaling == "rowwise" else (None, None)
    flat, g, weight = x.detach().flatten(0, 1), gradient.flatten(0, 1), state["weight"]
    expected = {
        "outputs": _rounded(flat, E4M3, row) @ _rounded(weight.t(), E4M3, column) + state["bias"],
        "x": _rounded(g, E5M2, row) @ _rounded(weight, E4M3, column),
        "weight": _rounded(g.t(), E5M2, row) @ _rounded(flat, E4M3, column),
        "bias": g.double().sum(dim=0),
    }
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    found = {
        "outputs": outputs.flatten(0, 1),
        "x": x.grad.flatten(0, 1),
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
    }
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].double(),
            value,
            rtol=1e-5,
            atol=1e-5 * value.abs().max().item(),
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_only_linear_layers_change_and_frozen_ones_get_no_gradient() -> None:
    block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU())
    use_fp8([block], scaling="off", device=torch.device("cpu"))
    assert type(block[1]) is nn.Linear
    use_fp8([block], scaling="tensorwise", device=torch.device("cpu"))
    assert [type(each).__name__ for each in block] == ["LayerNorm", "Fp8Linear", "GELU"]
    block[1].requires_grad_(False)
    block(torch.randn(3, 16)).sum().backward()
    assert block[1].weight.grad is None and block[0].weight.grad is not None
    zeros = fp8_product(torch.zeros(4, 16), torch.ones(16, 16), scaling="rowwise")
    assert torch.equal(zeros, torch.zeros(4, 16))
    poisoned = fp8_product(torch.full((4, 16), float("nan")), torch.ones(16, 16), scaling="rowwise")
    assert poisoned.isnan().all()  # the step is skipped, as with every other kind of product
    infinite = fp8_product(torch.full((4, 16), float("inf")), torch.ones(16, 16), scaling="tensorwise")
    assert not infinite.isfinite().any()
