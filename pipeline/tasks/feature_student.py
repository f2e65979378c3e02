"""A student that learns its teacher's features: in training it also returns its tokens by a linear layer.

The layer, `distill_projection`, is trained, is in checkpoints and averages, and is left out of the stage's model.
"""

from typing import cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from shardvit.model.init import stream_seed
from shardvit.pipeline.recipe.vocabulary import PROJECTION
from shardvit.pipeline.using.teacher import Teacher, compared_tokens


class FeatureStudent(VisionTransformer):
    """[n, C, S, S] -> logits [n, classes]; in training also [n, T, D], as the teacher's tokens."""

    distill_projection: nn.Linear
    compares_class_token: bool

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert attn_mask is None, "nobody here masks attention"
        tokens = self.forward_features(x)
        logits = self.forward_head(tokens)
        if not self.training:
            return logits
        compared = compared_tokens(tokens, prefix=self.num_prefix_tokens, class_token=self.compares_class_token)
        return logits, self.distill_projection(compared)


def make_feature_student(model: VisionTransformer, teacher: Teacher, *, seed: int) -> None:
    """Convert `model` in place, with a projection drawn from `seed`. They compare class tokens if both have one."""
    assert isinstance(teacher.model, VisionTransformer)
    both = teacher.compares_class_token = model.cls_token is not None and teacher.model.cls_token is not None
    with torch.random.fork_rng(devices=[]):
        layer = nn.Linear(model.embed_dim, teacher.model.embed_dim)
    generator = torch.Generator().manual_seed(stream_seed(seed, f"{PROJECTION}.weight"))
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    nn.init.zeros_(layer.bias)
    kind = type(model)
    model.__class__ = type(f"Feature{kind.__name__}", (FeatureStudent, kind), {"__module__": __name__})
    student = cast(FeatureStudent, model)
    student.compares_class_token, student.distill_projection = both, layer
