"""`model.counting` against torch's FlopCounterMode and the modules' parameters: equal to every digit."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.counting.flops import account
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import HeadKind
from tests.model.later_blocks import LATER_BLOCKS, fitting

SMALL: dict[str, Any] = {"width": 192, "depth": 3, "heads": 3, "patch_size": 8}


def counted(
    config: ModelConfig, *, image_size: int, num_classes: int, head: HeadKind, patch_dropout: float = 0.0
) -> tuple[int, int, int]:
    """Parameters, forward FLOPs, and forward and backward FLOPs, of one image, as torch counts them."""
    with torch.device("meta"):
        model = build_model(
            config,
            image_size=image_size,
            num_classes=num_classes,
            head=head,
            regularisation=Regularisation(patch_dropout=patch_dropout),
        ).train()
        images = torch.empty(1, 3, image_size, image_size)
        with FlopCounterMode(display=False) as forward:
            logits = model(images)
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


def agree(config: ModelConfig, *, image_size: int, head: HeadKind = "linear", patch_dropout: float = 0.0) -> None:
    arguments: dict[str, Any] = {"image_size": image_size, "num_classes": 1000, "head": head}
    ours = account(config, **arguments, patch_dropout=patch_dropout)
    theirs = counted(config, **arguments, patch_dropout=patch_dropout)
    assert (ours.parameters, ours.forward_flops, ours.training_flops) == theirs


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize("variant", ["Ti/16", "S/32", "B/16"])
def test_named_transformers(variant: str, pool: Any) -> None:
    agree(ModelConfig(variant=variant, pool=pool), image_size=224, head="mlp" if pool == "cls" else "linear")


@pytest.mark.parametrize("more", [{}, {"position": "learned_2d"}, {"position_at": "every_layer"}])
def test_a_class_token_without_position(more: dict[str, str]) -> None:
    agree(ModelConfig.model_validate(SMALL | more | {"class_token_position": "none"}), image_size=32)


@pytest.mark.parametrize(
    ("variant", "pool"), [("B/32", "cls"), ("L/16", "cls"), ("H/14", "gap"), ("g/14", "map"), ("G/14", "cls")]
)
def test_large_named_transformers(variant: str, pool: Any) -> None:
    agree(ModelConfig(variant=variant, pool=pool), image_size=224)


@pytest.mark.parametrize(("variant", "image_size"), [("L/16", 384), ("H/14", 518)])
def test_higher_resolution(variant: str, image_size: int) -> None:
    agree(ModelConfig(variant=variant), image_size=image_size)


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize(
    ("position", "position_at"),
    [
        ("none", "stem"),
        ("sincos_2d", "stem"),
        ("relative", "stem"),
        *((position, at) for position in ("learned_1d", "learned_2d") for at in ("every_layer", "every_layer_shared")),
        ("learned_2d", "stem"),
    ],
)
def test_position_embeddings(pool: Any, position: Any, position_at: Any) -> None:
    config = ModelConfig(**SMALL, pool=pool, position=position, position_at=position_at)
    agree(config, image_size=40)


@pytest.mark.parametrize(
    "more", [{"layer_scale": 0.1}, {"mlp_dim": 301}, {"gelu": "erf"}, {"layer_scale": 0.1, "pool": "map"}]
)
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_what_else_a_configuration_says(more: dict[str, Any], head: Any) -> None:
    agree(ModelConfig(**SMALL, **more), image_size=40, head=head)


@pytest.mark.parametrize(("pool", "rate"), [("cls", 0.5), ("cls", 0.75), ("gap", 0.3), ("map", 0.99)])
def test_patch_dropout(pool: Any, rate: float) -> None:
    agree(ModelConfig(**SMALL, pool=pool), image_size=40, patch_dropout=rate)


@pytest.mark.parametrize(
    ("config", "image_size"),
    [
        ({"variant": "R50+B/16"}, 224),
        ({"variant": "R50+L/32"}, 384),
        ({"variant": "R+Ti/16"}, 224),
        ({"variant": "R26+S/32", "pool": "map", "position": "learned_2d"}, 224),
        (SMALL | {"patch_size": 16, "resnet_layers": (1, 2), "resnet_width_factor": 2}, 64),
    ],
)
def test_hybrids(config: dict[str, Any], image_size: int) -> None:
    agree(ModelConfig(**config), image_size=image_size)


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({"variant": "R50x1"}, "linear"),
        ({"variant": "R101x1"}, "linear"),
        ({"resnet_layers": (1, 2, 1)}, "mlp"),
    ],
)
def test_pure_resnets(config: dict[str, Any], head: Any) -> None:
    agree(ModelConfig(**config), image_size=224, head=head)


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize("more", LATER_BLOCKS, ids=lambda more: " ".join(map(str, more.values())))
def test_what_came_after_the_paper(more: dict[str, Any], pool: Any) -> None:
    agree(ModelConfig(**SMALL, **fitting(more, pool=pool)), image_size=40)
