"""`model.resnet`: laws, what building may not cost or disturb, what is refused.

Logits and gradients are compared with flax's and timm's in tests/oracles.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.layers.head import MlpHead
from shardvit.model.resnet import BitResnet, Padding, StandardisedConv2d, standardise
from shardvit.model.vit import build_model, checkpoint_blocks
from tests.model.comparing import randomise

HYBRID = ModelConfig(width=48, depth=2, heads=4, mlp_dim=80, patch_size=16, resnet_layers=(1, 1))
RESNET = ModelConfig(resnet_layers=(1, 2))
BOTH = pytest.mark.parametrize("config", [HYBRID, RESNET], ids=["hybrid", "resnet"])


def _build(config: ModelConfig, *, head: str = "linear") -> nn.Module:
    model = build_model(config, image_size=32, num_classes=5, head=head)
    return randomise(model, scale=0.1)


def _images(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def test_standardisation_is_googles_formula() -> None:
    weight = np.random.default_rng(0).normal(0.3, 1e-4, size=(5, 3, 2, 2))  # of the size of the epsilon
    expected = np.stack(
        [(kernel - kernel.mean()) / (np.sqrt(np.mean((kernel - kernel.mean()) ** 2)) + 1e-5) for kernel in weight]
    )
    np.testing.assert_allclose(standardise(torch.from_numpy(weight)).numpy(), expected, rtol=1e-10)
    assert np.abs(expected.std(axis=(1, 2, 3)) - 0.9).max() < 0.1  # the epsilon counts here


def test_a_constant_kernel_becomes_zero_and_has_a_gradient() -> None:
    weight = torch.full((2, 3, 1, 1), 0.5, requires_grad=True)
    standardised = standardise(weight)
    assert not standardised.any()
    standardised.sum().backward()
    assert weight.grad is not None and weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_kernels_are_rounded_once(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(standardise(weight), standardise(weight.float()).to(dtype))


@pytest.mark.parametrize("pad", ["same", "fixed"])
@pytest.mark.parametrize(("kernel_size", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 2)])
@pytest.mark.parametrize("size", [8, 9, 11])
def test_where_the_zeros_go(pad: Padding, kernel_size: int, stride: int, size: int) -> None:
    """An output is the kernel over the padded input; TensorFlow pads ceil(size / stride) outputs' worth, the odd zero
    last, and BiT the same on both sides."""
    conv = StandardisedConv2d(2, 3, kernel_size, stride=stride, pad=pad)
    images = torch.randn(1, 2, size, size, generator=torch.Generator().manual_seed(0))
    total = kernel_size - 1 if pad == "fixed" else max(0, (-(-size // stride) - 1) * stride + kernel_size - size)
    padded = F.pad(images, (total // 2, total - total // 2) * 2)
    expected = F.conv2d(padded, standardise(conv.weight), stride=stride)
    torch.testing.assert_close(conv(images), expected)
    if pad == "same":
        assert expected.shape[-1] == -(-size // stride)


@BOTH
def test_every_norm_and_convolution_is_googles(config: ModelConfig) -> None:
    model = build_model(config, image_size=32, num_classes=5, head="linear")
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {(norm.num_groups, norm.eps) for norm in norms} == {(32, 1e-6)}
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    kinds = {(type(conv), getattr(conv, "pad", None)) for conv in convolutions}
    if config is HYBRID:
        assert kinds == {(StandardisedConv2d, "same"), (nn.Conv2d, None)}
        assert type(model.patch_embed.proj) is nn.Conv2d
    else:
        assert kinds == {(StandardisedConv2d, "fixed")}


@BOTH
def test_the_stride_is_in_the_middle_convolution(config: ModelConfig) -> None:
    model = build_model(config, image_size=32, num_classes=5, head="linear")
    network = model.patch_embed.backbone if config is HYBRID else model
    strides = [conv.stride[0] for name, conv in network.named_modules() if isinstance(conv, StandardisedConv2d)]
    assert strides.count(2) == 3  # the root, and of the second stage's first unit:
    unit = network.stages[1].blocks[0]
    assert unit.conv2.stride == unit.downsample.conv.stride == (2, 2)


def test_the_stems_tokens_are_the_projected_features_row_by_row() -> None:
    model = _build(HYBRID)
    with torch.no_grad():
        features = model.patch_embed.backbone(_images())
        tokens = model.patch_embed(_images())
    assert features.shape == (2, 512, 4, 4)  # a feature every 8 pixels, two of them a patch
    assert model.patch_embed.grid_size == (2, 2) and model.patch_embed.feat_ratio() == 16
    kernel, bias = model.patch_embed.proj.weight, model.patch_embed.proj.bias
    for token, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        patch = features[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        torch.testing.assert_close(tokens[:, token], torch.einsum("bchw,dchw->bd", patch, kernel) + bias)


@pytest.mark.parametrize(("pool", "position"), [("gap", "learned_1d"), ("map", "learned_1d"), ("cls", "none")])
def test_a_hybrid_has_any_pooling_and_position(pool: Any, position: Any) -> None:
    config = HYBRID.model_copy(update={"pool": pool, "position": position})
    assert _build(config, head="mlp")(_images()).shape == (2, 5)


@BOTH
@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_heads_features_and_logits(config: ModelConfig, head: str) -> None:
    model = _build(config, head=head).eval()
    assert model.num_classes == 5 and model.num_features == config.num_features
    with torch.no_grad():
        pooled = model.forward_head(model.forward_features(_images()), pre_logits=True)
        assert pooled.shape == (2, config.num_features)
        if config is RESNET:
            torch.testing.assert_close(pooled, model.forward_features(_images()).flatten(2).mean(dim=2))
        logits = model(_images())
        assert logits.shape == (2, 5) and logits.std() > 1e-3
        torch.testing.assert_close(logits, model.head(pooled))
    assert isinstance(model.head, MlpHead if head == "mlp" else nn.Linear)


@BOTH
def test_gradient_checkpointing_saves_activations_and_changes_no_gradient(config: ModelConfig) -> None:
    gradients, saved = [], []
    for enable in (False, True):
        model = _build(config)
        checkpoint_blocks(model, every=int(enable))
        shapes: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x):  # noqa: B023
            loss = model(_images()).square().sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        saved.append(sum(shape.numel() for shape in shapes if len(shape) == 4 and shape[0] == 2))
    assert saved[1] < 0.5 * saved[0]
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@BOTH
def test_every_parameter_gets_a_gradient(config: ModelConfig) -> None:
    model = _build(config, head="mlp")
    model(_images()).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []


@BOTH
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16_says_about_the_same(config: ModelConfig, how: str) -> None:
    model = _build(config).eval()
    with torch.no_grad():
        expected = model(_images())
        if how == "weights":
            logits = model.to(torch.bfloat16)(_images().to(torch.bfloat16))
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(_images())
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("variant", ["R50+L/32", "R152x4"])
def test_building_on_the_meta_device_costs_no_memory_and_no_pass(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandardisedConv2d, "forward", lambda *_: pytest.fail("a forward pass to build a model"))
    with torch.device("meta"):
        model = build_model(ModelConfig(variant=variant), image_size=384, num_classes=10, head="mlp")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    if variant == "R50+L/32":
        assert model.patch_embed.grid_size == (12, 12) and model.pos_embed.shape == (1, 145, 1024)


def test_another_resolution_changes_no_weight_of_a_resnet() -> None:
    model = _build(RESNET).eval()
    larger = build_model(RESNET, image_size=64, num_classes=5, head="linear").eval()
    larger.load_state_dict(model.state_dict(), strict=True)
    assert isinstance(larger, BitResnet)
    with torch.no_grad():
        assert torch.equal(larger(_images()), model(_images()))
        assert larger(torch.randn(2, 3, 64, 64)).shape == (2, 5)


def test_a_hybrid_at_an_impossible_resolution_is_refused() -> None:
    says = "image size 40 is not a multiple of the patch size 16: take 32 or 48"
    with pytest.raises(ValueError, match=says):
        build_model(HYBRID, image_size=40, num_classes=5, head="linear")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"image_size": 36}, "image size 36 is not a multiple of the ResNet's stride 8: take 32 or 40"),
        ({"num_classes": 0}, "num_classes must be at least 1, not 0"),
        ({"regularisation": Regularisation(dropout=0.1)}, "dropout is not for a pure ResNet: leave it out"),
        ({"regularisation": Regularisation(stochastic_depth=0.1)}, "stochastic_depth is not for a pure ResNet"),
    ],
)
def test_mistakes_are_refused_in_words(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_model(RESNET, **{"image_size": 32, "num_classes": 5, "head": "linear", **arguments})
