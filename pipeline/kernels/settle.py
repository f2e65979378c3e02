"""Set up a stage's kernels before its engine opens: what the recipe asks for, or what suits the device.

Reports each choice, and why it is not the fastest if so. Nothing here enters a checkpoint.

A step is bit-reproducible on the same GPU, with two exceptions that need torch's deterministic algorithms:
- Attention's backward pass sums the query gradients over tiles of keys in any order. On an H100 cuDNN repeats its bits
  for 197 tokens but not for 257 (`launch/bench/records/gpu_first_runs.txt`), as tiles of 128 would: two addends have
  one order. Other kernels never do.
- cuDNN may choose convolutions that sum in any order (hybrids and ResNets).
These cost nothing up to 256 tokens in half precision on compute capability 9 and 10; otherwise a slower attention.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from shardvit.data_shards.errors import UserError
from shardvit.model.positions.embedding import RelativeAttention
from shardvit.model.self_supervised.masked_autoencoder import MaskedAutoencoderVit
from shardvit.pipeline.kernels.attention import AttentionCase, attention_kernels, order_of
from shardvit.pipeline.kernels.cache import keep_compiled_code
from shardvit.pipeline.kernels.compiled_blocks import CompiledBlocks, compile_blocks, why_not_compiled
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import AttentionKernel, StageName

_TWO_TILES = 256  # tokens
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # for cuBLAS; torch demands one of two values
_REPEATING_WORKSPACES = (":4096:8", ":16:8")  # the first: torch's own size on compute capability 9
_FP32_NOTES = {  # (engine.fp32_matmul, is a GPU) -> note
    ("ieee", False): "",
    ("tf32", False): "float32 products are IEEE's, TF32 being for GPUs",
    ("ieee", True): "float32 products are IEEE's; engine.fp32_matmul: tf32 has tensor cores compute them, with 10 bits "
    "of mantissa",
    ("tf32", True): "float32 products are computed in TF32, with 10 bits of mantissa",
}


@dataclass(frozen=True)
class Kernels:
    """The chosen kernels."""

    notes: tuple[str, ...]  # for the screen, in order
    tags: Mapping[str, str]  # for MLflow
    compiled: CompiledBlocks | None  # None: nothing is compiled


@contextlib.contextmanager
def settled_kernels(
    recipe: Recipe, *, stage: StageName, model: nn.Module, run: Path | None = None, device: torch.device | None = None
) -> Iterator[Kernels]:
    """Make the stage's `model` (changed in place) compute as its recipe says, by default on this process's device;
    cache compiled code in the folder `run`, if given. UserError if the device cannot do what the recipe asks for."""
    if device is None:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    engine, notes, tags = recipe.engine, list[str](), {"shardvit.compile": "off"}
    with contextlib.ExitStack() as settings:
        settings.enter_context(fp32_products(engine.fp32_matmul))
        if engine.precision == "fp32":
            notes += [note for note in [_FP32_NOTES[engine.fp32_matmul, device.type == "cuda"]] if note]
        cases: list[AttentionCase] = []
        if isinstance(model, VisionTransformer):
            cases = _attention_cases(model, recipe, stage=stage, device=device)
        if device.type == "cuda":
            tags["shardvit.deterministic"] = engine.deterministic
            if engine.deterministic == "on":
                # Torch reads it once, at the process's first matrix product, and a later stage may need it.
                os.environ.setdefault(_WORKSPACE, _REPEATING_WORKSPACES[0])
            convolves = recipe.model.has_convolutions
            if engine.deterministic == "on" and not repeats_bits(cases, asked=engine.attention, convolves=convolves):
                settings.enter_context(deterministic_algorithms())
        if cases:
            chosen = settings.enter_context(attention_kernels(cases, asked=engine.attention))
            repeats = engine.deterministic == "off" or torch.are_deterministic_algorithms_enabled()
            if device.type == "cuda" and not repeats and any(each.kernel != "cudnn" for each in chosen):
                # torch refused what repeats its bits by itself
                settings.enter_context(deterministic_algorithms())
                chosen = settings.enter_context(attention_kernels(cases, asked=engine.attention))
            if len(recipe.image_sizes(stage)) > 1:  # a line for each kernel
                chosen = {each.kernel: each for each in chosen}.values()
            notes += [each.describe() for each in chosen]
            tags["shardvit.attention"] = "/".join(dict.fromkeys(each.kernel for each in chosen))
        compiled, why_not = _compiled(recipe, stage=stage, model=model, run=run, device=device)
        if compiled:
            tags["shardvit.compile"] = "blocks"
        elif why_not and device.type == "cuda":
            notes.append(f"the blocks are not compiled: {why_not}")
        yield Kernels(tuple(notes), tags, compiled)


@contextlib.contextmanager
def fp32_products(kind: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Compute float32 products and convolutions on a GPU in IEEE float32, or on tensor cores with a 10-bit mantissa.
    Sets the older switches, which also set the newer (`fp32_precision`); inductor raises if only those are set."""
    before = bool(torch.backends.cuda.matmul.allow_tf32), torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind == "tf32"
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def repeats_bits(cases: Sequence[AttentionCase], *, asked: AttentionKernel | Literal["auto"], convolves: bool) -> bool:
    """True if these attention cases are bit-reproducible without torch's deterministic mode."""
    if convolves:
        return False
    kernels = {order_of(case)[0][0] if asked == "auto" else asked for case in cases}
    return kernels == {"cudnn"} and all(case.tokens <= _TWO_TILES for case in cases)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use only torch's deterministic algorithms. UserError if the environment's cuBLAS workspace rules them out."""
    if os.environ.setdefault(_WORKSPACE, _REPEATING_WORKSPACES[0]) not in _REPEATING_WORKSPACES:
        raise UserError(
            f"{_WORKSPACE} is {os.environ[_WORKSPACE]}, with which matrix products need not repeat their bits: unset "
            f"it, set it to {_REPEATING_WORKSPACES[0]}, or set engine.deterministic: off"
        )
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # skip filling each new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


def _attention_cases(
    model: VisionTransformer, recipe: Recipe, *, stage: StageName, device: torch.device
) -> list[AttentionCase]:
    """List the blocks' cases: a training step's sequence, and the full one if it differs, of each size of images."""
    engine, config = recipe.engine, recipe.train_stage(stage)
    attention: Any = model.get_submodule("blocks.0.attn")
    on_gpu = device.type == "cuda"
    smaller = [recipe.model.grid_size(size) ** 2 for size in recipe.image_sizes(stage)[:-1]]
    lengths = [
        tokens(model, patches=patches, patch_dropout=rate)
        for patches in (*smaller, model.patch_embed.num_patches)
        for rate in (getattr(config, "mask_ratio", config.patch_dropout), 0.0)
    ]
    sequences = [(attention, length) for length in dict.fromkeys(lengths)]
    if isinstance(model, MaskedAutoencoderVit):
        sequences.append((model.get_submodule("decoder.blocks.0.attn"), lengths[-1]))
    return [
        AttentionCase(
            device="cuda" if on_gpu else "cpu",
            precision=engine.precision,
            heads=attention.num_heads,
            head_size=attention.head_dim,
            tokens=length,
            has_learnt_bias=isinstance(attention, RelativeAttention),
            has_pooling=getattr(model, "attn_pool", None) is not None,
            capability=torch.cuda.get_device_capability(device) if on_gpu else (0, 0),
            cudnn=(torch.backends.cudnn.version() or 0) if on_gpu and torch.version.hip is None else 0,
        )
        for attention, length in sequences
    ]


def tokens(model: VisionTransformer, *, patches: int, patch_dropout: float) -> int:
    """Sequence length in the blocks, with timm's count of patches after dropout."""
    left = max(1, int(patches * (1 - patch_dropout))) if patch_dropout else patches
    return model.num_prefix_tokens + left


def _compiled(
    recipe: Recipe, *, stage: StageName, model: nn.Module, run: Path | None, device: torch.device
) -> tuple[CompiledBlocks | None, str]:
    if recipe.engine.compile == "off":
        return None, ""
    asked = recipe.engine.compile == "blocks"
    if not asked and (why_not := why_not_compiled(recipe, recipe.train_stage(stage), device=device)):
        return None, why_not
    if run:
        keep_compiled_code(run)
    try:
        return compile_blocks(model, device=device), ""
    except UserError as error:
        if asked:
            raise
        return None, str(error)
