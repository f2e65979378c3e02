"""Measure this GPU's ceilings: copies, matrix products at the models' shapes, each of torch's attention kernels.

Products are those of training: forward (x W'), gradient of the input (dy W), of the weight (dy' x). Attention is
forward plus backward; its FLOPs are three times the forward pass's, without recomputation.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from shardvit.launch.bench.gpu_work import SIZES

_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_HEADS = 16
_SHAPES = ((197, 64), (577, 64), (256, 80), (257, 80), (1370, 80))  # tokens, head size: L/16 and H/14
_TOKENS_AT_ONCE = 32_768  # per attention batch
_COPY_BYTES = 1 << 30
_MIN_SECONDS = 0.1  # per measurement


@dataclass(frozen=True)
class Product:
    """TFLOP/s of one linear layer of a block, over a whole batch's tokens."""

    layer: str
    forward: float
    input_gradient: float
    weight_gradient: float


@dataclass(frozen=True)
class Attention:
    """TFLOP/s of forward plus backward, by kernel; None: torch's kernel refuses the shape."""

    tokens: int
    head: int
    tflops: dict[str, float | None]


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of one device."""

    device: str
    copy_gb_per_second: float  # read plus written
    products: dict[str, list[Product]]  # by size
    gemm_tflops: dict[str, float]  # by size: all products of a block together
    attention: list[Attention]


def ceilings(*, device: torch.device, sizes: Iterable[str]) -> Iterator[Ceilings]:
    """Measure the ceilings of a device; yields what is measured so far, at last all."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    found = Ceilings(name, _copy_gb_per_second(device), products={}, gemm_tflops={}, attention=[])
    for size in sizes:
        timed = list(_products(size, device=device))
        found.products[size] = [product for product, _, _ in timed]
        found.gemm_tflops[size] = sum(flops for _, flops, _ in timed) / sum(spent for _, _, spent in timed) / 1e12
        yield found
    for shape in _SHAPES if on_gpu else ((17, 32),):
        found.attention.append(_attention(*shape, device=device))
        yield found


def _copy_gb_per_second(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source)) / 1e9


def _products(size: str, *, device: torch.device) -> Iterator[tuple[Product, float, float]]:
    """Yield each layer with the total FLOPs and seconds of its three products."""
    sizes, tokens = SIZES[size].model.sizes, SIZES[size].images * SIZES[size].account.tokens
    width, hidden = sizes.width, sizes.mlp_dim
    layers = {"qkv": (width, 3 * width), "proj": (width, width), "fc1": (width, hidden), "fc2": (hidden, width)}
    for layer, (fan_in, fan_out) in layers.items():
        inputs = torch.randn(tokens, fan_in, device=device, dtype=torch.bfloat16)
        gradients = torch.randn(tokens, fan_out, device=device, dtype=torch.bfloat16)
        weight = torch.randn(fan_out, fan_in, device=device, dtype=torch.bfloat16)
        pairs = ((inputs, weight.t()), (gradients, weight), (gradients.t(), inputs))
        seconds = [_seconds(partial(torch.matmul, *pair)) for pair in pairs]
        flops = 2.0 * tokens * fan_in * fan_out
        yield Product(layer, *(flops / each / 1e12 for each in seconds)), 3 * flops, sum(seconds)


def _attention(tokens: int, head: int, *, device: torch.device) -> Attention:
    images = max(1, (_TOKENS_AT_ONCE if device.type == "cuda" else 64) // tokens)
    shape = (images, _HEADS, tokens, head)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)
    flops = 3 * 4.0 * images * _HEADS * tokens**2 * head
    found: dict[str, float | None] = {}
    for name, backend in _KERNELS.items():

        def both(backend: SDPBackend = backend) -> tuple[Tensor, ...]:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(query, key, value)
            return torch.autograd.grad(out, (query, key, value), gradient)

        try:
            found[name] = flops / _seconds(both) / 1e12
        except RuntimeError:  # "No available kernel", or out of memory in the math kernel
            found[name] = None
    return Attention(tokens, head, found)


def _seconds(action: Callable[[], object]) -> float:
    """Median seconds of a call, in blocks that end with a device synchronisation."""
    return Timer("action()", globals={"action": action}).blocked_autorange(min_run_time=_MIN_SECONDS).median
