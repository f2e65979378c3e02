"""FP8 products for the blocks' linear layers, by torch's scaled product; an experiment, for GPUs that have it.

Weights and inputs are rounded to e4m3 (3 bits of mantissa), gradients to e5m2 (2 bits, more range); each of a layer's
three products has scales made from the values themselves (dynamic): the largest magnitude becomes the format's largest.
tensorwise: one scale a tensor. rowwise: one for each row of the left factor and column of the right one, which rounds
better and costs more. Sums are taken in float32; master weights, optimizer, norms and attention are as without.

The law is torchao's; the state dict is a Linear's. What is learnt changes, so a run cannot switch it when it goes on.
No accuracy at the ViT paper's scale is known to us.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from data_shards.errors import UserError
from pipeline.recipe.vocabulary import Fp8Scaling

ALIGNMENT = 16  # of every side, in elements: torch._scaled_mm's
_NEEDED = {"tensorwise": (8, 9), "rowwise": (9, 0)}  # compute capability


class Fp8Linear(nn.Linear):
    """A Linear whose products are computed in FP8."""

    scaling: Literal["tensorwise", "rowwise"]

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the input's dtype."""
        product: Tensor = _Fp8Product.apply(input.flatten(0, -2), self.weight, self.scaling)
        outputs = product.unflatten(0, input.shape[:-1])
        return outputs if self.bias is None else outputs + self.bias


class _Fp8Product(torch.autograd.Function):
    """x [M, K], weight [N, K] -> x weight^T [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        return fp8_product(x, weight.t(), scaling=scaling)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = fp8_product(gradient, weight, scaling=ctx.scaling, left=torch.float8_e5m2)
        if ctx.needs_input_grad[1]:
            of_weight = fp8_product(gradient.t(), x, scaling=ctx.scaling, left=torch.float8_e5m2)
        return of_x, of_weight, None


def fp8_product(
    left_factor: Tensor, right_factor: Tensor, *, scaling: str, left: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    """[M, K] times [K, N] -> [M, N] in the factors' dtype; the left one is rounded to `left`, the right one to e4m3.

    K and, on a GPU, N must be multiples of 16; K is filled with zeros where it is a number of tokens.
    """
    if missing := -left_factor.shape[1] % ALIGNMENT:
        left_factor = functional.pad(left_factor, (0, missing))
        right_factor = functional.pad(right_factor, (0, 0, 0, missing))
    a, scale_a = _rounded(left_factor, dtype=left, dim=1 if scaling == "rowwise" else None)
    b, scale_b = _rounded(right_factor, dtype=torch.float8_e4m3fn, dim=0 if scaling == "rowwise" else None)
    return torch._scaled_mm(
        a.contiguous(), b.t().contiguous().t(), scale_a=scale_a, scale_b=scale_b, out_dtype=left_factor.dtype
    )


def _rounded(values: Tensor, *, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """In FP8, and the float32 scale that multiplies it back; one scale along `dim`, or one in all."""
    magnitudes = values.detach().abs()
    largest = magnitudes.amax() if dim is None else magnitudes.amax(dim=dim, keepdim=True)
    most = torch.finfo(dtype).max
    scale = largest.float().clamp(min=1e-12) / most
    return (values.float() / scale).clamp(-most, most).to(dtype), scale


def use_fp8(blocks: list[nn.Module], *, scaling: Fp8Scaling, device: torch.device) -> None:
    """Turn the blocks' Linears into `Fp8Linear`s, in place. UserError: this device has no such products."""
    if scaling == "off":
        return
    needed = _NEEDED[scaling]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < needed:
        raise UserError(
            f"engine.experimental.fp8 {scaling} needs a GPU of compute capability {needed[0]}.{needed[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}: "
            "set it to off"
        )
    try:
        ones = torch.ones(ALIGNMENT, ALIGNMENT, device=device, dtype=torch.bfloat16)
        fp8_product(ones, ones, scaling=scaling, left=torch.float8_e5m2)
    except RuntimeError as error:
        raise UserError(
            f"engine.experimental.fp8 {scaling}: torch has no scaled product for this device "
            f"({str(error).splitlines()[0]}): set it to off"
        ) from error
    for block in blocks:
        for module in block.modules():
            if type(module) is nn.Linear:
                module.__class__ = Fp8Linear  # the weights stay
                assert isinstance(module, Fp8Linear)
                module.scaling = scaling
