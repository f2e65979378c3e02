"""TF32 follows the recipe's key; which runs repeat their bits by themselves; on a GPU, what is claimed of kernels."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardvit.data_shards.errors import UserError
from shardvit.model.config import ModelConfig
from shardvit.model.vit import build_model
from shardvit.pipeline.kernels import settle
from shardvit.pipeline.kernels.attention import AttentionCase, ChosenKernel
from shardvit.pipeline.kernels.settle import deterministic_algorithms, fp32_products, repeats_bits, settled_kernels
from shardvit.pipeline.recipe.schema import Recipe


def case(tokens: int, *, precision: str = "bf16", **more: object) -> AttentionCase:
    known = {"heads": 16, "head_size": 64, "capability": (9, 0), "cudnn": 91_900} | more
    return AttentionCase("cuda", precision, tokens=tokens, **known)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("cases", "asked", "convolves", "expected"),
    [
        ([case(197)], "auto", False, True),
        ([case(99), case(197)], "auto", False, True),  # half the patches, and all
        ([case(256)], "cudnn", False, True),
        ([case(257)], "auto", False, False),
        ([case(99), case(577)], "auto", False, False),
        ([case(197)], "flash", False, False),
        ([case(197, precision="fp32")], "auto", False, False),
        ([case(197, capability=(8, 0))], "auto", False, False),  # flash
        ([case(197, has_learnt_bias=True)], "auto", False, False),  # efficient
        ([case(197)], "auto", True, False),
        ([], "auto", True, False),
    ],
)
def test_up_to_two_tiles_of_cudnn_have_one_order(cases, asked, convolves, expected):
    assert repeats_bits(cases, asked=asked, convolves=convolves) is expected


def test_torch_is_told_and_told_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_algorithms():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()  # which torch's attention takes for "off"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]


def test_a_workspace_that_repeats_nothing_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UserError, match=r"CUBLAS_WORKSPACE_CONFIG is :0:0.*engine\.deterministic: off"):
        deterministic_algorithms().__enter__()


def recipe_of(model: ModelConfig, *, image_size: int, **engine: str) -> Recipe:
    stage = {
        "train": "none",
        "eval": "none",
        "image_size": image_size,
        "global_batch_size": 8,
        "duration": "1 steps",
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    of_model = model.model_dump(exclude_unset=True)
    content = {"name": "x", "model": of_model, "engine": {"compile": "off", **engine}}
    return Recipe.model_validate({**content, "stages": {"pretrain": stage}})


@pytest.mark.parametrize(("deterministic", "expected"), [("on", ":4096:8"), ("off", None)])
def test_a_stage_that_repeats_its_bits_by_itself_prepares_for_one_that_does_not(monkeypatch, deterministic, expected):
    """Torch reads the variable once, at the first matrix product of a process: pre-training's, not fine-tuning's."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(settle, "repeats_bits", lambda *arguments, **options: True)
    recipe = recipe_of(ModelConfig(variant="S/16"), image_size=224, deterministic=deterministic)
    with settled_kernels(recipe, stage="pretrain", model=nn.Linear(1, 1), device=torch.device("cuda", 0)):
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == expected
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("kernel", "switched"), [("cudnn", False), ("flash", True)])
def test_what_torch_refuses_does_not_count_on_its_own_bits(kernel, switched, monkeypatch: pytest.MonkeyPatch):
    """And the kernels are chosen once more, as torch then refuses others."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    chosen_under: list[bool] = []

    def attention_kernels(*arguments, **options):
        chosen_under.append(torch.are_deterministic_algorithms_enabled())
        return contextlib.nullcontext([ChosenKernel(case(197), kernel, "")])

    monkeypatch.setattr(settle, "_attention_cases", lambda *arguments, **options: [case(197)])
    monkeypatch.setattr(settle, "attention_kernels", attention_kernels)
    recipe = recipe_of(ModelConfig(width=16, depth=1, heads=2, patch_size=4), image_size=8, deterministic="on")
    model = build_model(recipe.model, image_size=8, num_classes=2, head="linear")
    with settled_kernels(recipe, stage="pretrain", model=model, device=torch.device("cuda", 0)):
        assert torch.are_deterministic_algorithms_enabled() == switched
    assert not torch.are_deterministic_algorithms_enabled()
    assert chosen_under == [False, *[True] * switched]


@pytest.mark.parametrize("pool", ["map", "gap"])
def test_attention_pooling_is_part_of_the_case(pool):
    recipe = recipe_of(ModelConfig(width=16, depth=1, heads=2, patch_size=4, pool=pool), image_size=8)
    model = build_model(recipe.model, image_size=8, num_classes=2, head="linear")
    found = settle._attention_cases(model, recipe, stage="pretrain", device=torch.device("cpu"))
    assert found and all(each.has_pooling == (pool == "map") for each in found)


TWO_STAGES = """
import torch
from shardvit.model.vit import build_model
from shardvit.pipeline.kernels.settle import settled_kernels
from shardvit.pipeline.kernels.attention import order_of
from test_settle import ModelConfig, case, recipe_of

config = ModelConfig(width=128, depth=1, heads=2, patch_size=16)
for size, switched in ((224, False), (384, True)):
    recipe = recipe_of(config, image_size=size, precision="bf16")
    model = build_model(config, image_size=size, num_classes=2, head="linear").to("cuda", torch.bfloat16)
    with settled_kernels(recipe, stage="pretrain", model=model):
        here = {"capability": torch.cuda.get_device_capability(), "cudnn": torch.backends.cudnn.version() or 0}
        first = order_of(case(197, **here))[0][0] != "cudnn"
        assert torch.are_deterministic_algorithms_enabled() == (switched or first)
        model(torch.randn(2, 3, size, size, device="cuda", dtype=torch.bfloat16)).sum().backward()
"""


@pytest.mark.gpu
def test_stages_with_and_without_torchs_deterministic_algorithms_share_a_process():
    environ = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    subprocess.run([sys.executable, "-c", TWO_STAGES], env=environ, cwd=Path(__file__).parent, check=True)


@pytest.mark.parametrize("model", [{"variant": "R50+ViT-B/16"}, {"resnet_layers": [1, 1]}], ids=str)
def test_a_model_with_convolutions_says_so(model):
    if "variant" in model:
        model = {"width": 16, "depth": 1, "heads": 2, "patch_size": 4, "resnet_layers": []}
    assert ModelConfig.model_validate(model).has_convolutions
    assert not ModelConfig(variant="L/16").has_convolutions


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "head_size", "precision"),
    [(197, 64, "bf16"), (256, 64, "bf16"), (257, 80, "bf16"), (577, 64, "bf16"), (577, 64, "fp16"), (197, 64, "fp32")],
)
def test_attention_of_a_settled_stage_repeats_its_bits(tokens, head_size, precision):
    heads, size = 8, int((tokens - 1 if tokens in (197, 257, 577) else tokens) ** 0.5)
    has_token = size * size != tokens
    model = ModelConfig(width=heads * head_size, depth=1, heads=heads, patch_size=4, pool="cls" if has_token else "gap")
    recipe = recipe_of(model, image_size=4 * size, precision=precision)
    built = build_model(recipe.model, image_size=4 * size, num_classes=2, head="linear")
    with settled_kernels(recipe, stage="pretrain", model=built, device=torch.device("cuda", 0)):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
        generator = torch.Generator("cuda").manual_seed(0)
        packed = torch.randn(64, tokens, 3, heads, head_size, device="cuda", dtype=dtype, generator=generator)
        seed = torch.randn(64, heads, tokens, head_size, device="cuda", dtype=dtype, generator=generator)

        def gradient() -> torch.Tensor:
            inputs = packed.clone().requires_grad_()
            queries, keys, values = inputs.permute(2, 0, 3, 1, 4).unbind(0)
            functional.scaled_dot_product_attention(queries, keys, values).backward(seed)
            assert inputs.grad is not None
            return inputs.grad

        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(20))


@pytest.mark.parametrize(("kind", "allowed"), [("ieee", False), ("tf32", True)])
def test_products_and_convolutions_follow_the_key_and_go_back(kind: Any, allowed: bool) -> None:
    def switches() -> tuple[bool, bool]:
        return bool(torch.backends.cuda.matmul.allow_tf32), torch.backends.cudnn.allow_tf32

    before = switches()
    assert before == (False, True)  # torch's own defaults, which differ
    with contextlib.suppress(KeyError), fp32_products(kind):
        assert switches() == (allowed, allowed)
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == allowed
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") == allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # CPUs stay as they are
        raise KeyError
    assert switches() == before
