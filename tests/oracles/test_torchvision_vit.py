"""Our model against torchvision's VisionTransformer (tanh GELU, epsilon 1e-6): logits, dropout, resizing."""

from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from model.config import ModelConfig, Regularisation
from model.positions.interpolation import resize_state
from model.vit import build_model
from model.vocabulary import HeadKind
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured

CONFIG = ModelConfig(width=48, depth=4, heads=4, mlp_dim=80, patch_size=4)


def _theirs(head: HeadKind, *, dropout: float = 0.0, image_size: int = 24) -> VisionTransformer:
    model = VisionTransformer(
        image_size=image_size,
        patch_size=4,
        num_layers=4,
        num_heads=4,
        hidden_dim=48,
        mlp_dim=80,
        dropout=dropout,
        num_classes=5,
        representation_size=48 if head == "mlp" else None,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.GELU):
            model.set_submodule(name, nn.GELU(approximate="tanh"))
    return model


def _their_name(name: str) -> str:
    """timm's parameter name -> torchvision's."""
    for ours, theirs in [
        ("cls_token", "class_token"),
        ("pos_embed", "encoder.pos_embedding"),
        ("patch_embed.proj", "conv_proj"),
        ("blocks.", "encoder.layers.encoder_layer_"),
        ("norm1", "ln_1"),
        ("norm2", "ln_2"),
        ("attn.qkv.", "self_attention.in_proj_"),
        ("attn.proj", "self_attention.out_proj"),
        ("mlp.fc1", "mlp.0"),
        ("mlp.fc2", "mlp.3"),
        ("head.pre_logits", "heads.pre_logits"),
        ("head.logits", "heads.head"),
    ]:
        name = name.replace(ours, theirs)
    if name.startswith("norm."):
        return f"encoder.ln.{name.removeprefix('norm.')}"
    return f"heads.{name}" if name.startswith("head.") else name


def _pair(head: HeadKind, *, dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    """Our model and theirs with the same random weights; tokens are small, so that the epsilon matters."""
    ours = build_model(CONFIG, image_size=24, num_classes=5, head=head, regularisation=Regularisation(dropout=dropout))
    randomise(ours, token_scale=SMALL_TOKENS)
    theirs = _theirs(head, dropout=dropout)
    theirs.load_state_dict({_their_name(name): value for name, value in ours.state_dict().items()}, strict=True)
    return ours, theirs


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_logits(head: HeadKind, measured: Measured) -> None:
    ours, theirs = _pair(head)
    images = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = ours.eval()(images)
        assert logits.abs().mean() > 0.1
        semantic = f"ViT: cls, {head} head, learned_1d, tanh GELU"
        measured(semantic, "torchvision", "logits", logits, theirs.eval()(images))


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_dropout_falls_on_the_same_places(head: HeadKind, measured: Measured) -> None:
    """With the same random stream both models drop the same numbers, site by site and in the same order.

    One image only: torchvision's attention output is laid out [N, B, D], and masks are drawn in memory order.
    """
    ours, theirs = _pair(head, dropout=0.3)
    images = torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.manual_seed(5)
        logits = ours.train()(images)
        torch.manual_seed(5)
        measured("dropout 0.3, same random stream", "torchvision", "logits in training", logits, theirs.train()(images))
        assert (logits - ours.eval()(images)).abs().max() > 0.1


@pytest.mark.parametrize(("old", "new"), [(224, 384), (224, 512), (384, 224), (224, 224)])
def test_resized_position_embeddings(old: int, new: int, measured: Measured) -> None:
    pos_embed = torch.randn(1, 1 + (old // 16) ** 2, 8, generator=torch.Generator().manual_seed(3))
    config = ModelConfig(variant="B/16")
    ours = resize_state({"pos_embed": pos_embed}, config=config, from_image_size=old, to_image_size=new)
    weights = {"encoder.pos_embedding": pos_embed.double()}  # in float32 it rounds more than the rest differs
    theirs = interpolate_embeddings(new, 16, weights, interpolation_mode="bilinear")["encoder.pos_embedding"]
    semantic = "interpolation of positions, kernel google"
    measured(semantic, "torchvision, bilinear", "embeddings", ours["pos_embed"], theirs, below=1e-6)


@pytest.mark.parametrize(
    ("variant", "builder"),
    [("B/16", "vit_b_16"), ("B/32", "vit_b_32"), ("L/16", "vit_l_16"), ("L/32", "vit_l_32")],
)
def test_parameters_of_the_named_variants(variant: str, builder: str) -> None:
    with torch.device("meta"):
        ours = build_model(ModelConfig(variant=variant), image_size=224, num_classes=1000, head="linear")
        theirs = getattr(torchvision.models, builder)()
    shapes = {_their_name(name): value.shape for name, value in ours.state_dict().items()}
    assert shapes == {name: value.shape for name, value in theirs.state_dict().items()}
