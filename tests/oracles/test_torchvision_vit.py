"""Our model against torchvision's VisionTransformer (tanh GELU, epsilon 1e-6): logits, dropout, resizing."""

import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.formats.export import export_model
from shardvit.model.positions.interpolation import resize_state
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import HeadKind
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


def _pair(head: HeadKind, *, dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    """Our model and theirs with the same random weights; tokens are small, so that the epsilon matters."""
    ours = build_model(CONFIG, image_size=24, num_classes=5, head=head, regularisation=Regularisation(dropout=dropout))
    randomise(ours, token_scale=SMALL_TOKENS)
    theirs = _theirs(head, dropout=dropout)
    meta = SavedModelMeta(model=CONFIG, image_size=24, num_classes=5, class_names=tuple("abcde"), head=head)
    with tempfile.TemporaryDirectory() as folder:  # tests/model/formats checks the names
        export_model(meta, ours.state_dict(), to="torchvision", out=Path(folder, "vit.pth"))
        theirs.load_state_dict(torch.load(Path(folder, "vit.pth"), weights_only=True), strict=True)
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
