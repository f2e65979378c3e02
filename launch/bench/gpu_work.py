"""The work of every contender of `launch.bench.gpu`: model, weights, batch, loss, optimizer.

All start from the same weights, generated on the device, and train on one batch of random pixels that stays there, so
that only training is measured. The head does not start at zero, or losses would agree whatever the trunk computes.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.vocabulary import GOOGLES
from shardvit.model.config import ModelConfig
from shardvit.model.counting.flops import Accounting, account

LR, WEIGHT_DECAY, BETAS, EPS, CLIP = 1e-4, 0.1, (0.9, 0.999), 1e-8, 1.0
_STD = 0.02


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    name: str
    variant: str | None  # None: the tiny model
    image_size: int
    images: int
    classes: int = 1000
    patch_dropout: float = 0.0

    @property
    def model(self) -> ModelConfig:
        if self.variant is None:
            return ModelConfig(width=64, depth=2, heads=2, patch_size=4)
        return ModelConfig(variant=self.variant)

    @property
    def account(self) -> Accounting:
        return account(
            self.model,
            image_size=self.image_size,
            num_classes=self.classes,
            head="linear",
            patch_dropout=self.patch_dropout,
        )


SIZES = {
    size.name: size
    for size in (
        Size("L/16@224 b256", "L/16", 224, 256),
        Size("L/16@224 b64", "L/16", 224, 64),
        Size("H/14@224 b128", "H/14", 224, 128),
        Size("L/16@384 b128", "L/16", 384, 128),
        Size("L/16@224 b256, half the patches", "L/16", 224, 256, patch_dropout=0.5),
        Size("tiny", None, 16, 8, classes=10),
    )
}


def timm_model(size: Size) -> nn.Module:
    """timm's own class with Google's semantics: tanh GELU, LayerNorm epsilon 1e-6."""
    from timm.models.vision_transformer import VisionTransformer

    sizes = size.model.sizes
    return VisionTransformer(
        img_size=size.image_size,
        patch_size=sizes.patch_size,
        num_classes=size.classes,
        embed_dim=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.heads,
        mlp_ratio=sizes.mlp_dim / sizes.width,
        act_layer="gelu_tanh",
        norm_layer=partial(nn.LayerNorm, eps=size.model.layer_norm_eps),
    )


def with_seeded_weights(size: Size, *, device: torch.device) -> nn.Module:
    """timm's model on the device, with the initial weights of all contenders."""
    with torch.device("meta"):
        model = timm_model(size)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                parameter.normal_(std=_STD, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model.train()


def resident_batch(size: Size, *, device: torch.device) -> Batch:
    """Random pixels and labels in the loader's format, already on the device; nothing is mirrored."""
    generator = torch.Generator(device).manual_seed(1)
    shape, count = (size.images, size.image_size, size.image_size, 3), size.images
    return Batch(
        images=torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator),
        mirrored=torch.zeros(count, dtype=torch.bool, device=device),
        labels=torch.randint(size.classes, (count,), device=device, generator=generator),
        counted=torch.ones(count, dtype=torch.bool),
        substituted=torch.zeros(count, dtype=torch.bool),
        samples=torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.long),
        keys=("",) * count,
    )


def normalised(batch: Batch, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normalise pixels on the device as timm's PrefetchLoader does: -> [n, 3, size, size]."""
    mean, std = _statistics(batch.images.device)
    return batch.images.permute(0, 3, 1, 2).float().sub_(mean).div_(std).to(dtype).contiguous()


@cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (
        torch.tensor([255 * value for value in each], device=device)[:, None, None]
        for each in (GOOGLES.mean, GOOGLES.std)
    )
    return mean, std


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in float32."""
    return nn.functional.cross_entropy(logits.float(), labels)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """torch's fused AdamW; kernels decay, but not biases, norms, class token and positions."""
    kernels: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        embedded = any(word in name for word in ("pos_embed", "position_embeddings", "cls_token"))
        (others if parameter.ndim < 2 or embedded else kernels).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": kernels, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
