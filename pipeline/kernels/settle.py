"""Set up a stage's kernels before its engine is opened: what the recipe asks for, or what suits the device.

Each choice is a note, with the reason where it is not the fastest. Nothing here is kept in a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from data_shards.errors import UserError
from model.positions.embedding import RelativeAttention
from pipeline.kernels.attention import AttentionCase, attention_kernels
from pipeline.kernels.cache import keep_compiled_code
from pipeline.kernels.compiled_blocks import CompiledBlocks, compile_blocks, why_not_compiled
from pipeline.kernels.determinism import deterministic_algorithms, repeats_bits
from pipeline.recipe.schema import EngineConfig, Recipe
from pipeline.recipe.vocabulary import StageName


@dataclass(frozen=True)
class Kernels:
    """The chosen kernels."""

    notes: tuple[str, ...]  # for the screen, in order
    tags: Mapping[str, str]  # for MLflow
    compiled: CompiledBlocks | None  # tells what it compiles; None: nothing is


@contextlib.contextmanager
def settled_kernels(
    recipe: Recipe, *, stage: StageName, model: nn.Module, run: Path | None = None, device: torch.device | None = None
) -> Iterator[Kernels]:
    """Make the stage's `model` (changed in place) compute as its recipe says, on this process's device; compiled code
    is kept in the folder `run`, if one is given.

    UserError: the device cannot do what the recipe asks for."""
    device = device or _device()
    engine, notes, tags = recipe.engine, list[str](), {"shardvit.compile": "off"}
    with contextlib.ExitStack() as settings:
        settings.enter_context(fp32_products(engine.fp32_matmul))
        if engine.precision == "fp32" and (device.type == "cuda" or engine.fp32_matmul == "tf32"):
            notes.append(_describe_fp32(engine.fp32_matmul, device=device))
        cases: list[AttentionCase] = []
        if isinstance(model, VisionTransformer):
            patch_dropout = recipe.train_stage(stage).patch_dropout
            cases = _attention_cases(model, engine, patch_dropout=patch_dropout, device=device)
        if device.type == "cuda":
            tags["shardvit.deterministic"] = engine.deterministic
            convolves = recipe.model.has_convolutions
            if engine.deterministic == "on" and not repeats_bits(cases, asked=engine.attention, convolves=convolves):
                settings.enter_context(deterministic_algorithms())
        if cases:
            chosen = settings.enter_context(attention_kernels(cases, asked=engine.attention))
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
    """Compute float32 matrix products and convolutions on a GPU as IEEE says, or on tensor cores with 10 bits of
    mantissa. torch leaves TF32 off for products and on for convolutions. The older switches keep the newer ones
    (`fp32_precision`) in step; inductor raises where only the newer are set."""
    before = bool(torch.backends.cuda.matmul.allow_tf32), torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind == "tf32"
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _describe_fp32(kind: Literal["ieee", "tf32"], *, device: torch.device) -> str:
    if device.type != "cuda":
        return "float32 products are IEEE's, TF32 being for GPUs"
    if kind == "tf32":
        return "float32 products are computed in TF32, with 10 bits of mantissa"
    return (
        "float32 products are IEEE's; engine.fp32_matmul: tf32 has tensor cores compute them, with 10 bits of mantissa"
    )


def _attention_cases(
    model: VisionTransformer, engine: EngineConfig, *, patch_dropout: float, device: torch.device
) -> list[AttentionCase]:
    """Of the blocks: the sequence of a training step, and the whole one, if they differ."""
    attention = model.get_submodule("blocks.0.attn")
    on_gpu = device.type == "cuda"
    lengths = [tokens(model, patch_dropout=patch_dropout), tokens(model, patch_dropout=0.0)]
    return [
        AttentionCase(
            device="cuda" if on_gpu else "cpu",
            precision=engine.precision,
            heads=attention.num_heads,  # pyright: ignore[reportArgumentType]
            head_size=attention.head_dim,  # pyright: ignore[reportArgumentType]
            tokens=length,
            has_learnt_bias=isinstance(attention, RelativeAttention),
            capability=torch.cuda.get_device_capability(device) if on_gpu else (0, 0),
            cudnn=(torch.backends.cudnn.version() or 0) if on_gpu and torch.version.hip is None else 0,
        )
        for length in dict.fromkeys(lengths)
    ]


def tokens(model: VisionTransformer, *, patch_dropout: float) -> int:
    """A sequence's length in the blocks; patch dropout leaves as many patches as timm's."""
    patches: int = model.patch_embed.num_patches
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
