"""`model.vit`: sizes, semantics that can be read off the modules, and what building may not disturb.

The numbers themselves are compared with independent implementations in tests/oracles.
"""

from typing import Any

import pytest
import torch
from torch import nn

from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.init import initialise
from shardvit.model.variants import HYBRIDS, RESNETS
from shardvit.model.vit import PatchProjection, build_model, checkpoint_blocks, timm_arguments
from tests.model.comparing import randomise

SMALL = ModelConfig(width=48, depth=2, heads=4, mlp_dim=80, patch_size=4)


@pytest.mark.parametrize("variant", ["g/14", "G/14"])
def test_mlp_sizes_that_are_no_whole_multiple_of_the_width(variant: str) -> None:
    config = ModelConfig(variant=variant)
    with torch.device("meta"):
        model: Any = build_model(config, image_size=224, num_classes=10, head="linear")
    assert {block.mlp.fc1.out_features for block in model.blocks} == {config.sizes.mlp_dim}


def test_any_mlp_size_is_met_exactly() -> None:
    """timm takes a ratio and truncates: a plain quotient misses some sizes by one."""
    for width, mlp_dim in [(48, mlp_dim) for mlp_dim in range(1, 400)] + [
        (1408, 6144),
        (1664, 8192),
        (49, 99),
    ]:
        config = ModelConfig(width=width, depth=1, heads=1, mlp_dim=mlp_dim, patch_size=4)
        ratio = timm_arguments(config, image_size=8)["mlp_ratio"]
        assert int(width * ratio) == mlp_dim


def test_every_layer_norm_has_googles_epsilon() -> None:
    model = build_model(SMALL, image_size=16, num_classes=5, head="linear")
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * 2 + 1
    assert {norm.eps for norm in norms} == {1e-6}


def test_dropout_sites() -> None:
    model = build_model(SMALL, image_size=16, num_classes=5, head="mlp", regularisation=Regularisation(dropout=0.3))
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    active = {name for name, rate in rates.items() if rate > 0}
    per_block = ("attn.proj_drop", "mlp.drop1", "mlp.drop2")
    assert active == {"pos_drop"} | {f"blocks.{i}.{site}" for i in range(2) for site in per_block}
    assert {rates[name] for name in active} == {0.3}


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_logits_are_the_head_of_the_normed_class_token(head: str) -> None:
    model = build_model(SMALL, image_size=16, num_classes=5, head=head).eval()
    randomise(model)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        features = model.forward_features(images)
        assert features.shape == (2, 1 + 16, 48)
        torch.testing.assert_close(features[:, 0], model.norm(_after_last_block(model, images)[:, 0]))
        torch.testing.assert_close(model(images), model.head(features[:, 0]))
        assert model(images).shape == (2, 5)


def _after_last_block(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    tokens = model.patch_embed(images)
    tokens = torch.cat([model.cls_token.expand(len(images), -1, -1), tokens], dim=1) + model.pos_embed
    return model.blocks(tokens)


@pytest.mark.parametrize("config", [SMALL, ModelConfig(resnet_layers=(1, 1))], ids=["vit", "resnet"])
def test_building_and_initialising_leave_the_global_random_stream_alone(config: ModelConfig) -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    initialise(build_model(config, image_size=16, num_classes=5, head="mlp"), seed=0)
    assert torch.equal(torch.randn(4), expected)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    images = torch.randn(2, 3, 16, 16)
    gradients = []
    for every in (0, 1, 2):
        model = build_model(
            SMALL, image_size=16, num_classes=5, head="linear", regularisation=Regularisation(dropout=0.1)
        )
        randomise(model)
        checkpoint_blocks(model, every=every)
        torch.manual_seed(0)
        model(images).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, *others in zip(*gradients, strict=True):
        for checkpointed in others:
            torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"image_size": 18}, "image size 18 is not a multiple of the patch size 4"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"regularisation": Regularisation(dropout=1.0)}, "dropout must be at least 0 and below 1"),
    ],
)
def test_mistakes_are_refused_in_words(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_model(SMALL, **{"image_size": 16, "num_classes": 5, "head": "linear", **arguments})


@pytest.mark.parametrize("precision", [torch.float64, torch.bfloat16], ids=str)
def test_patches_are_projected_as_by_the_convolution_of_the_same_weights(precision: torch.dtype) -> None:
    model = build_model(SMALL, image_size=16, num_classes=5, head="linear").to(precision)
    ours = randomise(model).get_submodule("patch_embed.proj")
    assert isinstance(ours, PatchProjection) and ours.weight.shape == (48, 3, 4, 4)
    theirs = nn.Conv2d(3, 48, kernel_size=4, stride=4, dtype=precision)
    theirs.load_state_dict(ours.state_dict())
    results: list[tuple[torch.Tensor, ...]] = []
    for projection in (ours, theirs):
        images = torch.randn(2, 3, 16, 12, generator=torch.Generator().manual_seed(1)).to(precision).requires_grad_()
        outputs = projection(images)
        assert outputs.shape == (2, 48, 4, 3)
        outputs.square().sum().backward()
        results.append((outputs, *(each.grad for each in (images, projection.weight, projection.bias))))
    within = {torch.float64: 1e-12, torch.bfloat16: 2e-2}[precision]
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its, rtol=within, atol=within * float(its.detach().abs().max()))


def test_a_hybrids_projection_stays_a_convolution() -> None:
    config = SMALL.model_copy(update={"resnet_layers": (1,), "width": 64, "patch_size": 8})
    model = build_model(config, image_size=16, num_classes=5, head="linear")
    assert type(model.get_submodule("patch_embed.proj")) is nn.Conv2d


def _build(variant: str, *, head: str = "linear") -> nn.Module:
    with torch.device("meta"):
        return build_model(ModelConfig(variant=variant), image_size=224, num_classes=1000, head=head)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("variant", "num_parameters"),
    [
        ("B/16", 86_567_656),
        ("B/32", 88_224_232),
        ("L/16", 304_326_632),
        ("H/14", 632_045_800),
        ("R50+B/16", 98_659_112),
        ("R+Ti/16", 6_337_704),
    ],
)
def test_the_figures_of_google(variant: str, num_parameters: int) -> None:
    """google-research/vision_transformer, `models_test.py`."""
    assert _count(_build(variant)) == num_parameters


@pytest.mark.parametrize(
    ("variant", "millions"),
    [("R50x1", 25.5), ("R50x3", 217.3), ("R101x1", 44.5), ("R101x3", 387.9), ("R152x2", 236.3), ("R152x4", 936.5)],
)
def test_the_figures_of_bit(variant: str, millions: float) -> None:
    """google-research/big_transfer's models at 1000 classes, as timm's cards print them."""
    assert round(_count(_build(variant)) / 1e6, 1) == millions


def test_every_source_names_a_paper_or_a_file() -> None:
    assert all("arXiv" in variant.source for variant in RESNETS.values())
    assert all("ViT paper" in variant.source for variant in HYBRIDS.values())
