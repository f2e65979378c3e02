"""No model's step asks CUDA for what torch's deterministic algorithms refuse, or do at a multiple of its memory.

The operations are those of a CPU, seen below autograd: but for attention's kernels, a GPU's are the same.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardvit.model.config import DecoderConfig, ModelConfig, Regularisation
from shardvit.model.init import initialise
from shardvit.model.layers.chosen_tokens import chosen_tokens
from shardvit.model.layers.dropout import words_of
from shardvit.model.loss import loss_function
from shardvit.model.self_supervised.masked_autoencoder import build_masked_autoencoder
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.model.vit import build_model, takes_other_sizes
from shardvit.model.vocabulary import LossKind
from tests.model.later_blocks import LATER_BLOCKS

# `torch.use_deterministic_algorithms`' page; "scatter_add" and the like make an index of every value.
REFUSED = (
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
    *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward", "grid_sampler_2d_backward"),
    *("_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward"),
    *("reflection_pad2d_backward", "max_unpool2d", "nll_loss2d_forward", "put_", "histc", "median", "bincount"),
    *("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "gather_backward"),
)
VIT = {"width": 16, "depth": 2, "heads": 2, "patch_size": 4}
KINDS: list[dict[str, Any]] = [
    VIT,
    {**VIT, "pool": "map"},
    {**VIT, "pool": "gap"},
    {**VIT, "position": "relative"},
    {**VIT, "position": "learned_2d", "position_at": "every_layer"},
    {**VIT, "position": "sincos_2d"},
    {**VIT, "distillation_token": "learned"},
    {**VIT, "resnet_layers": [1]},
    {"resnet_layers": [1, 1]},
    *({**VIT, "pool": "gap" if {"class_token", "final_norm"} & {*more} else "cls", **more} for more in LATER_BLOCKS),
]
COUNT, SIZE, CLASSES = 3, 24, 5


class Seen(TorchDispatchMode):
    """What would be refused or inflated inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.total = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, self.total = func.overloadpacket.__name__, self.total + 1
        if name in REFUSED:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def seen(step: Callable[[], Tensor]) -> dict[str, int]:
    with Seen() as mode:
        step().backward()
    assert mode.total > 5
    return dict(mode.found)


def give_words(model: nn.Module) -> None:
    if (words := words_of(model)) is not None:
        words.give(torch.randint(-(2**31), 2**31, (len(words.sites), COUNT, 2)).int(), step_word=7)


@pytest.mark.parametrize("size", [SIZE, SIZE // 2], ids=["its size", "smaller"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_classifiers_step(kind: dict[str, Any], size: int):
    config = ModelConfig.model_validate(kind)
    rates = {"dropout": 0.1, "stochastic_depth": 0.2, "patch_dropout": 0.5, "masks": "sample"}
    if config.kind == "resnet":
        rates = {}
    elif config.position == "relative" or config.position_at != "stem" or config.rope != "none":
        del rates["patch_dropout"]
    if size != SIZE and config.position == "relative":
        pytest.skip("relative positions have one size")
    model = build_model(
        config, image_size=SIZE, num_classes=CLASSES, head="linear", regularisation=Regularisation(**rates)
    )
    initialise(model, seed=1)
    if size != SIZE:
        takes_other_sizes(model, interpolation=config.interpolation)
    give_words(model.train())
    images, loss = torch.randn(COUNT, 3, size, size), loss_function("softmax", label_smoothing=0.1)
    assert seen(lambda: loss(model(images), torch.arange(COUNT))) == {}


@pytest.mark.parametrize("targets", [torch.arange(COUNT), torch.full((COUNT, CLASSES), 0.2)], ids=["one", "shares"])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "bce"])
def test_a_loss(kind: LossKind, targets: Tensor):
    logits = torch.randn(COUNT, CLASSES, requires_grad=True)
    assert seen(lambda: loss_function(kind)(logits, targets)) == {}


@pytest.mark.parametrize("more", [{}, {"position": "learned_2d"}, {"resnet_layers": [1]}], ids=str)
def test_masked_patches(more: dict[str, Any]):
    model = build_masked_patch(ModelConfig.model_validate({**VIT, **more}), image_size=SIZE)
    initialise(model, seed=1)
    patches = model.patch_embed.num_patches
    source = torch.arange(patches).repeat(COUNT, 1)
    source[:, ::3] = patches  # masks, and another patch's embedding twice
    source[:, 1] = 4
    corrupted = torch.arange(0, patches, 2).repeat(COUNT, 1)
    assert seen(lambda: model(torch.randn(COUNT, 3, SIZE, SIZE), source, corrupted).square().mean()) == {}


def test_a_masked_autoencoder():
    decoder = DecoderConfig(width=16, depth=1, heads=2)
    model = build_masked_autoencoder(ModelConfig.model_validate(VIT), image_size=SIZE, decoder=decoder)
    initialise(model, seed=1)
    order = torch.stack([torch.randperm(36) for _ in range(COUNT)])
    assert seen(lambda: model(torch.randn(COUNT, 3, SIZE, SIZE), order[:, :9], order[:, 9:]).square().mean()) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_tokens_and_their_gradient_are_a_gathers_to_the_last_bit(dtype: torch.dtype):
    tokens = torch.randn(4, 7, 5, dtype=dtype)[:, 1:].requires_grad_()
    numbers = torch.stack([torch.randperm(6)[:3] for _ in range(4)])
    found, gathered = chosen_tokens(tokens, numbers), tokens.gather(1, numbers[..., None].expand(-1, -1, 5))
    weight = torch.randn(4, 3, 5).to(dtype)
    gradients = [torch.autograd.grad((each * weight).sum(), tokens)[0] for each in (found, gathered)]
    assert torch.equal(found, gathered) and torch.equal(*gradients)


def test_what_would_be_refused_or_inflated_is_seen():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert seen(lambda: F.interpolate(x, scale_factor=2, mode="bilinear").sum()) == {"upsample_bilinear2d_backward": 1}
    index = torch.zeros(2, 3, 8, 8, dtype=torch.int64)
    assert seen(lambda: x.gather(1, index).square().mean()).keys() <= {"scatter_add", "scatter_add_", "gather_backward"}
    assert seen(lambda: x.gather(1, index).square().mean())
    assert seen(lambda: F.adaptive_avg_pool2d(x, 3).sum()) == {"_adaptive_avg_pool2d_backward": 1}
