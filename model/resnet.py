"""placeholder: helper RESNET writes this"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from model.config import ModelConfig
from model.head import HeadKind
from model.regularisation import NO_REGULARISATION, Regularisation


def stem_embedding(config: ModelConfig, *, image_size: int) -> Callable[..., nn.Module]:
    raise NotImplementedError


def build_resnet(
    config: ModelConfig,
    *,
    image_size: int,
    num_classes: int,
    head: HeadKind,
    regularisation: Regularisation = NO_REGULARISATION,
) -> nn.Module:
    raise NotImplementedError
