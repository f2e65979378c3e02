"""Choose, try and name the attention kernel for a device, precision and shape.

torch has four: cuDNN, FlashAttention 2, xFormers' memory-efficient one, and `math`, which keeps all T x T logits. It
silently takes the first that supports the shape. We set the order for the whole stage, and run two images of the real
shape to see which is taken. Those below it stay allowed: attention pooling has one query, evaluation no gradient.

Rules, from `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `sdp_utils_cpp.h`:
- cudnn first on compute capability 9 and 10, torch's own rule (`check_prefer_cudnn_attention`), unless this cuDNN may
  be wrong for the shape (`_fault_of_cudnn`). Head sizes: multiples of 8 up to 128.
- flash: half precision, compute capability 8.0 and above, head sizes up to 256.
- a learnt bias (`model.positions.embedding`): efficient or math. Flash takes none; cuDNN (`check_attn_mask_shape`) and
  the CPU kernel give it no gradient.
- float32: efficient. bf16 below compute capability 8.0 (no tensor cores for it): math.
- CPU: one fused kernel, which torch calls flash, for every precision.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.recipe.vocabulary import AttentionKernel

_PREFER_CUDNN = (9, 10)  # compute capabilities
_NODES = {  # a kernel's autograd node -> the kernel
    "ScaledDotProductCudnnAttentionBackward": "cudnn",
    "ScaledDotProductFlashAttentionBackward": "flash",
    "ScaledDotProductFlashAttentionForCpuBackward": "flash",
    "ScaledDotProductEfficientAttentionBackward": "efficient",
}


@dataclass(frozen=True)
class AttentionCase:
    """Everything the choice depends on."""

    device: Literal["cpu", "cuda"]
    precision: Literal["bf16", "fp16", "fp32"]
    heads: int
    head_size: int
    tokens: int
    has_learnt_bias: bool = False
    has_pooling: bool = False  # attention with one query, after the blocks
    capability: tuple[int, int] = (0, 0)  # of the GPU
    cudnn: int = 0  # version, such as 91501; 0: none

    @property
    def dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.precision]

    def describe(self) -> str:
        where = f"compute capability {self.capability[0]}.{self.capability[1]}" if self.device == "cuda" else "a CPU"
        bias = ", with a learnt bias" if self.has_learnt_bias else ""
        return f"{self.precision}, {self.heads} heads of {self.head_size}, {self.tokens} tokens{bias}, on {where}"


def order_of(case: AttentionCase) -> tuple[tuple[AttentionKernel, ...], str]:
    """List the kernels that support the case, fastest first, and why a faster one does not."""
    aligned = case.head_size % 8 == 0
    if case.device == "cpu":
        if case.has_learnt_bias:
            return ("math",), "a learnt bias has a gradient, which the CPU's fused kernel does not give"
        return ("flash", "math"), ""
    efficient: tuple[AttentionKernel, ...] = ("efficient",) if aligned else ()
    if case.precision == "bf16" and case.capability < (8, 0):
        return ("math",), "bf16 has no fused kernel below compute capability 8.0: take engine.precision fp16"
    if case.has_learnt_bias:
        return (*efficient, "math"), "flash takes no bias, and cuDNN gives one no gradient"
    if case.precision == "fp32":
        return (*efficient, "math"), "flash and cuDNN compute in half precision alone"
    if case.capability < (8, 0):
        return (*efficient, "math"), "flash and cuDNN need compute capability 8.0"
    if case.head_size > 256:
        return (*efficient, "math"), "flash takes heads of at most 256, cuDNN of 128"
    if not aligned or case.head_size > 128 or not case.cudnn:
        return ("flash", *efficient, "math"), ""
    fault = _fault_of_cudnn(case)
    if fault or case.capability[0] not in _PREFER_CUDNN:
        return ("flash", "cudnn", *efficient, "math"), fault
    return ("cudnn", "flash", *efficient, "math"), ""


def _fault_of_cudnn(case: AttentionCase) -> str:
    """Say why cuDNN, where it would come first, may be wrong, or return "" if nothing is known against it.

    From PyTorch's issues 193893 and 196678 and cudnn-frontend's 1072.
    """
    if case.capability[0] not in _PREFER_CUDNN:
        return ""
    if case.cudnn < 91_501:
        return f"cuDNN {case.cudnn} is loaded, and its kernel is right for all lengths from 9.15.1 on"
    if case.cudnn < 92_600 and case.capability[0] == 9 and case.tokens % 128 == 64:
        return f"cuDNN {case.cudnn} is loaded, and before 9.26 its gradients may be NaN for {case.tokens} tokens"
    return "cuDNN's kernel may be wrong for the single query of attention pooling" if case.has_pooling else ""


@dataclass(frozen=True)
class ChosenKernel:
    """The kernel that runs one case."""

    case: AttentionCase
    kernel: AttentionKernel
    why_slower: str  # than for other shapes, devices or settings; "": it is the fastest

    def describe(self) -> str:
        note = f"attention runs on the kernel {self.kernel}: {self.case.describe()}"
        return f"{note}; not on a faster one: {self.why_slower}" if self.why_slower else note


@contextlib.contextmanager
def attention_kernels(
    cases: Sequence[AttentionCase], *, asked: AttentionKernel | Literal["auto"]
) -> Iterator[list[ChosenKernel]]:
    """Use the kernel `asked` for, or the fastest. UserError if it does not support one of `cases`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    able, _ = order_of(next(filter(_fault_of_cudnn, cases), cases[0]))
    wanted = {"auto": able, "math": ("math",)}.get(asked, (asked, *able))
    with sdpa_kernel([backends[kernel] for kernel in wanted], set_priority=True):
        yield [_choice(case, asked=asked) for case in cases]


def _choice(case: AttentionCase, *, asked: AttentionKernel | Literal["auto"]) -> ChosenKernel:
    able, reason = order_of(case)
    ran = kernel_that_runs(case)
    if asked not in ("auto", ran):
        reasons = "; ".join(_objections(case, asked)) or reason or "torch takes another"
        raise UserError(
            f"engine.attention {asked} cannot do {case.describe()} ({reasons}): take {ran}, which can, or auto"
        )
    if ran != able[0]:
        reason = "engine.attention asks for it" if asked == ran else "; ".join(_objections(case, able[0]))
        reason = reason or f"torch refuses {able[0]}, or it may be wrong for another length of the stage"
    return ChosenKernel(case, ran, reason)


def kernel_that_runs(case: AttentionCase) -> AttentionKernel:
    """Run attention forward and backward for two images, and read the kernel from the autograd graph."""
    shape = 2, case.tokens, 3, case.heads, case.head_size
    packed = torch.zeros(shape, device=case.device, dtype=case.dtype, requires_grad=True)
    queries, keys, values = packed.permute(2, 0, 3, 1, 4).unbind(0)  # the layout of timm's Attention
    attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=_bias(case))
    attended.sum().backward()
    nodes, seen = [attended.grad_fn], set[object]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if kernel := _NODES.get(node.name().rstrip("0123456789")):
            return kernel  # pyright: ignore[reportReturnType] -- a kernel of the table
        nodes += [following for following, _ in node.next_functions]
    return "math"


def _bias(case: AttentionCase) -> Tensor | None:
    if not case.has_learnt_bias:
        return None
    shape = 2, case.heads, case.tokens, case.tokens
    return torch.zeros(shape, device=case.device, dtype=case.dtype, requires_grad=True)


def _objections(case: AttentionCase, kernel: AttentionKernel) -> list[str]:
    """Return torch's own reasons against a kernel; it gives them on GPUs only."""
    if case.device == "cpu":
        return [] if kernel in ("flash", "math") else ["it needs a GPU"]
    from torch.backends import cuda

    if kernel == "math":
        return []
    can_use = getattr(cuda, f"can_use_{kernel}_attention")
    shape = 2, case.heads, case.tokens, case.head_size
    query = torch.zeros(shape, device=case.device, dtype=case.dtype, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        can_use(cuda.SDPAParams(query, query, query, _bias(case), 0.0, False, False), True)
    return [str(each.message).split(" (Triggered internally")[0] for each in caught]
