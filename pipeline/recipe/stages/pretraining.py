"""Recipe keys of the stages that begin a run. No torch."""

from collections.abc import Iterator

from pydantic import Field

from shardvit.model.vocabulary import HeadKind
from shardvit.pipeline.recipe.data import FewShotConfig
from shardvit.pipeline.recipe.stages.teaching import DistillConfig
from shardvit.pipeline.recipe.stages.train_stage import Init, StageHead, TrainStage


class MaskedPatchStage(TrainStage):
    """Self-supervised pre-training: predict colours of corrupted patches (ViT paper, appendix B.1.2)."""

    init: Init = "google"
    """Initial weights as in vision_transformer (google), big_vision (other learned positions) or timm; or weights to
    start from: a run, stage, checkpoint, a file or folder of any format, hf-hub:OWNER/NAME or https:."""

    @property
    def head_kind(self) -> StageHead:
        return "masked_patch"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        why = "with masked patch prediction"
        yield from self.ignored("loss", "label_smoothing", "patch_dropout", "metrics", "task", why=why)
        yield from self.augment.ignored("random_erasing", "mixup_alpha", "cutmix_alpha", why=why, group="augment.")


class PretrainStage(TrainStage):
    """Supervised pre-training, by default with a head of one hidden layer."""

    head: HeadKind = "mlp"
    """mlp: one hidden layer (ViT paper); linear: none (Google's GAP models, BiT's ResNets)."""
    head_bias: float = 0.0
    """Initial bias of the last layer; Google uses -10 with the sigmoid loss (ImageNet-21k)."""
    init: Init = "google"
    """Initial weights as in vision_transformer (google), big_vision (other learned positions) or timm; or weights to
    start from: a run, stage, checkpoint, a file or folder of any format, hf-hub:OWNER/NAME or https:."""
    few_shot: tuple[FewShotConfig, ...] = Field(default=(), max_length=100)
    """Small data sets for few-shot accuracy at evaluations."""

    distill: DistillConfig | None = None
    """Learn from a teacher."""

    @property
    def head_kind(self) -> StageHead:
        return self.head

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        names = [each.name for each in self.few_shot]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"few_shot names {twice[0]} twice: give each set its own name"
