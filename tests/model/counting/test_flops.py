"""`model.counting.flops`: the papers' numbers, and laws (torch has the last word in tests/oracles)."""

import subprocess
import sys
from typing import Any

import pytest

from shardvit.model.config import ModelConfig
from shardvit.model.counting.flops import Accounting, account


def at_1000_classes(variant: str, image_size: int = 224, **more: Any) -> Accounting:
    return account(ModelConfig(variant=variant, **more), image_size=image_size, num_classes=1000, head="linear")


@pytest.mark.parametrize(
    ("variant", "image_size", "tokens", "gflop"),
    [
        ("B/16", 224, 197, 35.1),
        ("L/16", 224, 197, 123.1),
        ("H/14", 224, 257, 334.6),
        ("L/16", 384, 577, 382.1),
        ("H/14", 518, 1370, 2033),
    ],
)
def test_forward_pass_of_the_papers_models(variant: str, image_size: int, tokens: int, gflop: float) -> None:
    """2 (T - 1) k d + L (8 T d^2 + 4 T d m + 4 T^2 d) + 2 d C, worked out by hand."""
    ours = at_1000_classes(variant, image_size)
    assert ours.tokens == tokens
    assert ours.forward_flops / 1e9 == pytest.approx(gflop, rel=2e-3)


def test_training_is_three_forward_passes_less_the_pixels_gradient() -> None:
    ours = at_1000_classes("B/16")
    patch_embedding = 2 * 196 * (3 * 16 * 16) * 768
    assert ours.training_flops == 3 * ours.forward_flops - patch_embedding


@pytest.mark.parametrize(("variant", "tokens", "width"), [("B/16", 197, 768), ("H/14", 257, 1280)])
def test_a_block_keeps_32_bytes_for_each_number_of_its_tokens(variant: str, tokens: int, width: int) -> None:
    sizes = ModelConfig(variant=variant).sizes
    shape = {"width": width, "heads": sizes.heads, "patch_size": sizes.patch_size}
    of_one, of_two = (
        account(ModelConfig(**shape, depth=depth), image_size=224, num_classes=10, head="mlp") for depth in (1, 2)
    )
    kept = of_two.activation_bytes - of_one.activation_bytes
    assert kept == pytest.approx(32 * tokens * width, rel=5e-3)  # the rest are statistics
    checkpointed = of_two.checkpointed_activation_bytes - of_one.checkpointed_activation_bytes
    assert checkpointed == 2 * tokens * width
    # A single block is the live one: there is nothing to save.
    assert of_one.checkpointed_activation_bytes == of_one.activation_bytes


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_half_of_the_patches_are_half_of_the_work(pool: Any) -> None:
    arguments: dict[str, Any] = {"image_size": 224, "num_classes": 1000, "head": "linear"}
    config = ModelConfig(variant="L/16", pool=pool)
    whole, half = account(config, **arguments), account(config, **arguments, patch_dropout=0.5)
    assert half.tokens == 98 + (pool == "cls")
    assert half.parameters == whole.parameters
    assert half.forward_flops == pytest.approx(whole.forward_flops / 2, rel=0.03)
    assert half.activation_bytes == pytest.approx(whole.activation_bytes / 2, rel=0.02)


def test_one_line_for_people() -> None:
    assert at_1000_classes("B/16").describe() == (
        "86.57 M parameters, 35.13 GFLOP forward and 105.2 GFLOP training per image, 197 tokens, "
        "59.16 MB activations per image in bf16"
    )
    assert at_1000_classes("B/16").describe("checkpointed") == (
        "86.57 M parameters, 35.13 GFLOP forward and 105.2 GFLOP training per image, 197 tokens, "
        "9.090 MB checkpointed activations per image in bf16"
    )
    tiny = account(ModelConfig(width=8, depth=1, heads=2, patch_size=4), image_size=4, num_classes=2, head="linear")
    assert tiny.describe().startswith("1.322 k parameters, ") and ", 2 tokens, " in tiny.describe()
    assert at_1000_classes("R50x1").describe() == (
        "25.55 M parameters, 8.178 GFLOP forward and 24.30 GFLOP training per image, "
        "39.60 MB activations per image in bf16"
    )


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"variant": "B/16"}, {"image_size": 225}, "image size 225 is not a multiple"),
        ({"variant": "R50x1"}, {"image_size": 240}, "image size 240 is not a multiple"),
        ({"variant": "B/16"}, {"num_classes": 0}, "num_classes must be at least 1"),
        ({"variant": "B/16"}, {"patch_dropout": 1.0}, "patch_dropout must be at least 0 and below 1"),
        ({"variant": "R50x1"}, {"patch_dropout": 0.5}, "patch_dropout is not for a pure ResNet"),
        ({"variant": "B/16", "position": "relative"}, {"patch_dropout": 0.5}, "patch_dropout needs positions"),
    ],
)
def test_what_the_model_would_refuse_is_refused(config: Any, more: Any, message: str) -> None:
    arguments = {"image_size": 224, "num_classes": 10, "head": "linear"} | more
    with pytest.raises(ValueError, match=message):
        account(ModelConfig(**config), **arguments)


def test_no_torch_is_imported() -> None:
    code = "import sys, shardvit.model.counting.flops; "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'timm', 'numpy')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
