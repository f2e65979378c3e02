"""Our model against transformers' ViT, and a saved model read by transformers alone."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from model.config import ModelConfig
from model.saved.model_folder import SavedModelMeta, save_model
from model.vit import build_model
from model.vocabulary import HeadKind
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured

CONFIG = ModelConfig(width=48, depth=4, heads=4, mlp_dim=80, patch_size=4)


def _random_model(head: HeadKind = "linear") -> nn.Module:
    """Random weights everywhere; tokens are small, so that LayerNorm's epsilon matters."""
    model = build_model(CONFIG, image_size=24, num_classes=5, head=head)
    return randomise(model, token_scale=SMALL_TOKENS).eval()


def _images() -> torch.Tensor:
    return torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))


def _to_transformers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """timm's names -> those of transformers' ViT; the fused q/k/v becomes three."""
    renamed: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        for ours, theirs in [
            ("cls_token", "vit.embeddings.cls_token"),
            ("pos_embed", "vit.embeddings.position_embeddings"),
            ("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
            ("blocks.", "vit.layers."),
            ("norm1", "layernorm_before"),
            ("norm2", "layernorm_after"),
            ("attn.proj", "attention.o_proj"),
            ("head.", "classifier."),
        ]:
            name = name.replace(ours, theirs)
        if name.startswith("norm."):
            name = f"vit.layernorm.{name.removeprefix('norm.')}"
        if "attn.qkv" in name:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                renamed[name.replace("attn.qkv", f"attention.{part}_proj")] = rows
        else:
            renamed[name] = value
    return renamed


def test_logits(measured: Measured) -> None:
    ours = _random_model()
    theirs = ViTForImageClassification(
        ViTConfig(
            hidden_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=80,
            hidden_act="gelu_pytorch_tanh",
            layer_norm_eps=1e-6,
            image_size=24,
            patch_size=4,
            num_labels=5,
        )
    ).eval()
    theirs.load_state_dict(_to_transformers(ours.state_dict()), strict=True)
    with torch.no_grad():
        logits = ours(_images())
        assert logits.abs().mean() > 0.1
        semantic = "ViT: cls, linear head, learned_1d, tanh GELU"
        measured(semantic, "transformers", "logits", logits, theirs(_images()).logits)


def _save(folder: Path, head: HeadKind) -> nn.Module:
    model = _random_model(head)
    names = ("cat", "dog", "cow", "hen", "emu")
    meta = SavedModelMeta(model=CONFIG, image_size=24, num_classes=5, class_names=names, head=head)
    save_model(folder, model.state_dict(), meta=meta)
    return model


def test_a_saved_linear_head_is_read_from_the_same_file(tmp_path: Path) -> None:
    ours = _save(tmp_path / "model", "linear")
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        # timm projects patches by a convolution, we by a product: equal but for rounding.
        torch.testing.assert_close(theirs(_images()).logits, ours(_images()), rtol=0, atol=1e-5)
    assert theirs.config.id2label == {0: "cat", 1: "dog", 2: "cow", 3: "hen", 4: "emu"}


def test_transformers_prepares_pixels_as_recorded(tmp_path: Path) -> None:
    _save(tmp_path / "model", "linear")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model")
    image = torch.randint(0, 256, (24, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    pixels = processor(image.numpy(), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels[0], (image.permute(2, 0, 1).float() - 127.5) / 127.5)


def test_transformers_refuses_a_saved_mlp_head(tmp_path: Path) -> None:
    """It would otherwise load the trunk, attach a random head and only warn."""
    _save(tmp_path / "model", "mlp")
    with pytest.raises(ValueError, match=r"[Uu]nrecognized model"):
        AutoModelForImageClassification.from_pretrained(tmp_path / "model")
