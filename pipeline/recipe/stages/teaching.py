"""Recipe keys for learning from a teacher (`distill` of pretrain and finetune). No torch."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from shardvit.pipeline.recipe.data import without_secrets
from shardvit.pipeline.recipe.duration import Strict

Kind = Literal["hard", "soft", "feature"]


class DistillConfig(Strict):
    """Learn from a teacher that sees the same pixels, mixed ones too; see docs/recipes.md. It costs its weights on each
    GPU and a forward pass per image, both in bf16."""

    teacher: Annotated[str, Field(min_length=1), AfterValidator(without_secrets)]
    """Weights as for `init` (a run, stage, checkpoint, a file or folder of any format, hf-hub:OWNER/NAME, https:), or a
    timm folder of any other architecture. Its classes are the shards', in their order."""
    kind: Kind
    """hard: cross-entropy with the teacher's top-1 (DeiT); soft: KL divergence from its softmax at `temperature`;
    feature: its normed final tokens, by a linear layer and smooth L1 (arXiv 2205.14141)."""
    share: float = Field(default=0.5, gt=0, le=1)
    """Share of the teacher's term in the loss; the rest is `loss` on labels. DeiT: 0.5 (hard), 0.1 (soft); 1: no labels
    (patient and consistent, arXiv 2106.05237; feature distillation)."""
    temperature: float = Field(default=1.0, gt=0, le=1000)
    """kind soft: logits are divided by it, and the divergence multiplied by its square; DeiT's table: 3."""
    precision: Literal["auto", "fp32"] = "auto"
    """Of the teacher. auto: float32 with engine.precision fp32, else bf16."""

    def problems(self) -> Iterator[str]:
        if self.kind != "soft":
            yield from self.ignored("temperature", why=f"with kind {self.kind}")
