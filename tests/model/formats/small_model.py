"""A small model with random weights, for the tests of formats: its head too, which would start at zero."""

from typing import Any

import torch
from torch import Tensor, nn

from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import SavedModelMeta, build_described
from tests.model.comparing import SMALL_TOKENS, randomise

CONFIG = ModelConfig(width=48, depth=4, heads=4, mlp_dim=80, patch_size=4)
NAMES = ("cat", "dog", "cow", "hen", "emu \N{LATIN SMALL LETTER E WITH ACUTE}")


def described(config: ModelConfig = CONFIG, **changes: Any) -> SavedModelMeta:
    """A record of five classes and 24 pixels."""
    fields = {"image_size": 24, "num_classes": 5, "class_names": NAMES, "head": "linear"}
    return SavedModelMeta(model=config, **fields | changes)


def random_model(meta: SavedModelMeta) -> nn.Module:
    """In evaluation mode. Tokens are small, so that LayerNorm's epsilon matters."""
    return randomise(build_described(meta), token_scale=SMALL_TOKENS).eval()


def images(size: int = 24) -> Tensor:
    """Three of them, as the model sees them."""
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(2))


def logits(model: nn.Module, pixels: Tensor) -> Tensor:
    """What a model, ours or another's, answers."""
    with torch.no_grad():
        answer = model(pixels)
    return getattr(answer, "logits", answer)


def rebuilt(meta: SavedModelMeta, state: dict[str, Tensor]) -> nn.Module:
    """Our model from an import."""
    model = build_described(meta)
    model.load_state_dict(state, strict=True)
    return model.eval()
