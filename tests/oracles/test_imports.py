"""What other libraries wrote, imported: their own logits from our model.

One usual model of each; tests/model/formats has the others.
"""

from pathlib import Path

import timm
import torch
from timm.models import save_for_hf
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification

from shardvit.model.config import ModelConfig
from shardvit.model.formats.detect import import_file
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.model.formats.small_model import images, logits, rebuilt
from tests.oracles.conftest import Measured

SIZES = {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}


def _compare(measured: Measured, path: Path, theirs: nn.Module, *, library: str, what: str) -> None:
    meta, state = import_file(path, config=ModelConfig(**SIZES))
    expected = logits(theirs.eval(), images())
    assert expected.abs().mean() > 0.1
    measured(f"import of {what}", library, "logits", logits(rebuilt(meta, state), images()), expected)


def test_of_timm(tmp_path: Path, measured: Measured) -> None:
    arguments = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 4, "num_heads": 4, "mlp_ratio": 80 / 48}
    theirs = timm.create_model("vit_base_patch16_224", num_classes=5, **arguments)
    save_for_hf(randomise(theirs, token_scale=SMALL_TOKENS), tmp_path / "theirs", model_args=arguments)
    _compare(measured, tmp_path / "theirs", theirs, library="timm", what="timm's folder (erf GELU)")


def test_of_transformers(tmp_path: Path, measured: Measured) -> None:
    """Its defaults: epsilon 1e-12, which small tokens tell from 1e-6."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 80}
    theirs = ViTForImageClassification(ViTConfig(**sizes, image_size=24, patch_size=4, num_labels=5))
    randomise(theirs, token_scale=SMALL_TOKENS).save_pretrained(tmp_path / "theirs")
    _compare(
        measured,
        tmp_path / "theirs",
        theirs,
        library="transformers",
        what="transformers' folder (erf GELU, epsilon 1e-12)",
    )


def test_of_torchvision(tmp_path: Path, measured: Measured) -> None:
    theirs = VisionTransformer(24, 4, num_layers=4, num_heads=4, hidden_dim=48, mlp_dim=80, num_classes=5)
    torch.save(randomise(theirs, token_scale=SMALL_TOKENS).state_dict(), tmp_path / "vit.pth")
    _compare(measured, tmp_path / "vit.pth", theirs, library="torchvision", what="torchvision's state dict (erf GELU)")
