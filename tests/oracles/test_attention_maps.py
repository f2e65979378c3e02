"""Attention probabilities against timm's own extraction and transformers' outputs, each of its own forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import set_fused_attn
from timm.models.vision_transformer import VisionTransformer
from timm.utils import AttentionExtract
from transformers import ViTForImageClassification

from shardvit.model.config import ModelConfig
from shardvit.model.formats.export import export_model
from shardvit.model.inspection import look_at_attention
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.model.vit import build_model
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured

SIZES: dict[str, Any] = {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}


def _build(config: ModelConfig) -> VisionTransformer:
    model = build_model(config, image_size=24, num_classes=5, head="linear")
    assert isinstance(model, VisionTransformer)
    return randomise(model, token_scale=SMALL_TOKENS).eval()


def _images() -> torch.Tensor:
    return torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))


def _ours(model: VisionTransformer) -> torch.Tensor:
    found: list[torch.Tensor] = []
    look_at_attention(model, _images(), see=lambda _, probabilities: found.append(probabilities))
    return torch.stack(found)


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_timms_extraction(measured: Measured, pool: Any) -> None:
    """It reads probabilities out of attention that is not fused, which must be set before the model is built."""
    model = _build(ModelConfig(**SIZES, pool=pool))
    set_fused_attn(False)
    try:
        unfused = _build(ModelConfig(**SIZES, pool=pool))
    finally:
        set_fused_attn(True)
    extract = AttentionExtract(unfused, names=["blocks.*.attn.attn_drop"], method="hook")
    with torch.no_grad():
        theirs = torch.stack(list(extract(_images()).values()))
    measured(f"attention of all blocks and heads: {pool}", "timm", "probabilities", _ours(model), theirs)


def test_transformers_output(measured: Measured, tmp_path: Path) -> None:
    config = ModelConfig(**SIZES)
    model = _build(config)
    meta = SavedModelMeta(model=config, image_size=24, num_classes=5, class_names=tuple("abcde"), head="linear")
    export_model(meta, model.state_dict(), to="transformers", out=tmp_path / "hf")
    oracle = ViTForImageClassification.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = torch.stack(oracle(_images(), output_attentions=True).attentions)
    measured("attention of all blocks and heads: cls", "transformers", "probabilities", _ours(model), theirs)
