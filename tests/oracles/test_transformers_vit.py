"""Our model against transformers' ViT, and a saved model read by transformers alone."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTForImageClassification

from shardvit.model.config import ModelConfig
from shardvit.model.formats.export import export_model
from shardvit.model.saved.model_folder import SavedModelMeta, save_model
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import HeadKind
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured

CONFIG = ModelConfig(width=48, depth=4, heads=4, mlp_dim=80, patch_size=4)


def _random_model(head: HeadKind = "linear") -> nn.Module:
    """Random weights everywhere; tokens are small, so that LayerNorm's epsilon matters."""
    model = build_model(CONFIG, image_size=24, num_classes=5, head=head)
    return randomise(model, token_scale=SMALL_TOKENS).eval()


def _images() -> torch.Tensor:
    return torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))


def test_logits(tmp_path: Path, measured: Measured) -> None:
    ours, meta = _random_model(), _meta("linear")
    export_model(meta, ours.state_dict(), to="transformers", out=tmp_path / "hf")
    theirs = ViTForImageClassification.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        logits = ours(_images())
        assert logits.abs().mean() > 0.1
        semantic = "ViT: cls, linear head, learned_1d, tanh GELU"
        measured(semantic, "transformers", "logits", logits, theirs(_images()).logits)


def _meta(head: HeadKind) -> SavedModelMeta:
    names = ("cat", "dog", "cow", "hen", "emu")
    return SavedModelMeta(model=CONFIG, image_size=24, num_classes=5, class_names=names, head=head)


def _save(folder: Path, head: HeadKind) -> None:
    save_model(folder, _random_model(head).state_dict(), meta=_meta(head))


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
