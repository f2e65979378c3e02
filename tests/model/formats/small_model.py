"""A small model with random weights, for the tests of formats: its head too, which would start at zero."""

from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.saved import SavedModelMeta, build_described

CONFIG = ModelConfig(width=48, depth=4, heads=4, mlp_dim=80, patch_size=4)
NAMES = ("cat", "dog", "cow", "hen", "emu \N{LATIN SMALL LETTER E WITH ACUTE}")


def described(config: ModelConfig = CONFIG, **changes: Any) -> SavedModelMeta:
    """A record of five classes and 24 pixels."""
    fields = {"image_size": 24, "num_classes": 5, "class_names": NAMES, "head": "linear"}
    return SavedModelMeta(model=config, **fields | changes)


def random_model(meta: SavedModelMeta) -> nn.Module:
    """In evaluation mode. Tokens are small, so that LayerNorm's epsilon matters."""
    model = build_described(meta)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.01 if name in ("pos_embed", "cls_token") or name.startswith("patch_embed") else 0.2
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model.eval()


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


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value."""
    assert expected.abs().max() > 0.1
    return float((found - expected).abs().max() / expected.abs().max())
