"""Small files of Google's, and models to compare with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.formats.google_npz import (
    GoogleNames,
    write_google_npz,
)
from shardvit.model.saved.model_folder import SavedModelMeta, side_path
from shardvit.model.vit import build_model

SIZES: dict[str, Any] = {"width": 16, "depth": 11, "heads": 2, "mlp_dim": 24, "patch_size": 4}
Arrays = dict[str, np.ndarray]


def meta_of(**more: Any) -> SavedModelMeta:
    """A record; `head` and `image_size` are its own, everything else the trunk's."""
    head, image_size = more.pop("head", "linear"), more.pop("image_size", 12)
    model = ModelConfig.model_validate((SIZES if "variant" not in more else {}) | more)
    return SavedModelMeta(model=model, image_size=image_size, num_classes=3, class_names=("a", "b", "c"), head=head)


def state_of(meta: SavedModelMeta) -> dict[str, torch.Tensor]:
    assert meta.head != "masked_patch"
    with torch.device("meta"):
        model = build_model(meta.model, image_size=meta.image_size, num_classes=3, head=meta.head)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}


def arrays_of(tmp_path: Path, names: GoogleNames = "vision_transformer", **more: Any) -> Arrays:
    """What we write for a model, without the record."""
    meta, path = meta_of(**more), tmp_path / "written.npz"
    write_google_npz(path, state_of(meta), meta=meta, names=names)
    side_path(path).unlink()
    with np.load(path) as file:
        return dict(file)


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)
    return path


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
