"""Dropout and the like, all off by default. Label smoothing is in `model.loss`, augmentation in `data_shards`."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import ModelConfig
from model.vocabulary import DropoutMasks


@dataclass(frozen=True)
class Regularisation:
    """Rates, each at least 0 and below 1, and who draws the masks."""

    dropout: float = 0.0  # wherever `model.vit` says (ViT paper, Table 3: 0.1 for ImageNet pre-training, else 0)
    stochastic_depth: float = 0.0  # of the last block's branches; linear to 0 at the first (arXiv 1603.09382)
    patch_dropout: float = 0.0  # share of the patch tokens that a training step leaves out (FLIP, arXiv 2212.00794)
    masks: DropoutMasks = "process"  # drawn from the process's generator; sample: from words that are given (`dropout`)

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError if a rate is out of range, or means nothing to a model of this `config`."""
        for name in ("dropout", "stochastic_depth", "patch_dropout"):
            rate = getattr(self, name)
            if not 0.0 <= rate < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, not {rate}")
            if rate and config.kind == "resnet":
                raise ValueError(f"{name} is not for a pure ResNet: leave it out")
        if self.patch_dropout and (config.position == "relative" or config.position_at != "stem"):
            raise ValueError(
                "patch_dropout needs positions that are added once, before the patches are left out: "
                f"not position {config.position} at {config.position_at}"
            )


NO_REGULARISATION = Regularisation()
