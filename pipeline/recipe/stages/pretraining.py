"""Recipe keys of the stages that begin a run. No torch."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from shardvit.model.config import DecoderConfig
from shardvit.model.vocabulary import HeadKind
from shardvit.pipeline.recipe.data import FewShotConfig
from shardvit.pipeline.recipe.stages.image_growth import growth_of
from shardvit.pipeline.recipe.stages.teaching import DistillConfig
from shardvit.pipeline.recipe.stages.train_stage import Init, StageHead, TrainStage


class SelfSupervisedStage(TrainStage):
    """A stage that ignores labels."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        why = f"with {str(self.head_kind).replace('_', ' ')}" + " prediction" * (self.head_kind == "masked_patch")
        yield from self.ignored("loss", "label_smoothing", "patch_dropout", "metrics", "task", why=why)
        yield from self.augment.ignored("random_erasing", "mixup_alpha", "cutmix_alpha", why=why, group="augment.")


class MaskedPatchStage(SelfSupervisedStage):
    """Self-supervised pre-training: predict colours of corrupted patches (ViT paper, appendix B.1.2)."""

    init: Init = "google"
    """Initial weights as in vision_transformer (google), big_vision (other learned positions) or timm; or weights to
    start from: a run, stage, checkpoint, a file or folder of any format, hf-hub:OWNER/NAME or https:."""

    @property
    def head_kind(self) -> StageHead:
        return "masked_patch"


class MaskedAutoencoderStage(SelfSupervisedStage):
    """Self-supervised pre-training: encode few patches, and decode the pixels of the others (MAE, arXiv 2111.06377)."""

    mask_ratio: float = Field(default=0.75, gt=0, lt=1)
    """Share of hidden patches; the others are rounded down, to at least one (MAE, figure 5: 0.75)."""
    decoder: DecoderConfig = DecoderConfig()
    """Width, depth and heads of the decoder, which only this stage has (MAE: 512, 8, 16)."""
    target: Literal["normalised", "pixels"] = "normalised"
    """normalised: each patch's pixels minus their mean, over their deviation (MAE, table 1d); pixels: as the encoder
    gets them."""
    init: Init = "mae"
    """Initial weights as in facebookresearch/mae, or the others of pretrain; or weights to start the trunk from."""
    few_shot: tuple[FewShotConfig, ...] = Field(default=(), max_length=100)
    """Small data sets for few-shot accuracy at evaluations, on features of whole images: the class token, or without
    pool cls the mean of the patches."""

    @property
    def head_kind(self) -> StageHead:
        return "masked_autoencoder"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.ignored("dropout", "stochastic_depth", why="in a masked autoencoder")
        if growth_of(self.image_size):
            yield "image_size: a masked autoencoder is built for images of one size: give one number"
        yield from _twice(self.few_shot)


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
        yield from _twice(self.few_shot)


def _twice(few_shot: tuple[FewShotConfig, ...]) -> Iterator[str]:
    names = [each.name for each in few_shot]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"few_shot names {twice[0]} twice: give each set its own name"
