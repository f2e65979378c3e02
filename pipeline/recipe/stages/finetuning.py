"""Recipe keys of the head swap and of fine-tuning, and which stages go together. No torch."""

from collections.abc import Iterator
from typing import Literal

from shardvit.pipeline.recipe.duration import Strict
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage, MaskedPatchStage, PretrainStage
from shardvit.pipeline.recipe.stages.teaching import DistillConfig
from shardvit.pipeline.recipe.stages.train_stage import Init, TrainStage
from shardvit.pipeline.recipe.vocabulary import (
    ALL_STAGES,
    StageName,
)


class SwapHeadStage(Strict):
    """Replace the pre-training head with a zero-initialised linear layer for the fine-tuning classes."""

    head: Literal["new", "kept"] = "new"
    """kept: go on with the linear head, for the same classes, as DeiT does at another resolution."""
    model: str | None = None
    """Start from this model folder (from `shardvit import`), not an earlier stage; also the default of `model`."""


class FinetuneStage(TrainStage):
    """Train all weights, usually at higher resolution."""

    start: Literal["swap_head", "scratch"] = "swap_head"
    """swap_head: start from that stage's model; scratch: from `init`, with the same linear head."""
    init: Init = "google"
    """Initial weights with start: scratch, as in pretrain: a style, or weights to start from."""

    distill: DistillConfig | None = None
    """Learn from a teacher."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.start == "swap_head":
            yield from self.ignored("init", why="with start swap_head, which brings its weights")
            if "head" in self.optimizer.frozen:
                yield (
                    "optimizer.frozen names the head, which swap_head leaves at zero, so no gradient would pass it: "
                    "leave it out"
                )


class Stages(Strict):
    """Stages to run, in this order."""

    masked_patch: MaskedPatchStage | None = None
    masked_autoencoder: MaskedAutoencoderStage | None = None
    pretrain: PretrainStage | None = None
    swap_head: SwapHeadStage | None = None
    finetune: FinetuneStage | None = None

    def problems(self) -> Iterator[str]:
        first = self.first
        swap, start = self.swap_head, self.finetune and self.finetune.start
        if not self.names:
            yield "at least one of masked_patch, masked_autoencoder, pretrain, swap_head and finetune is needed"
        begin = [name for name in self.names if name not in ("swap_head", "finetune")]
        if len(begin) > 1:
            yield f"{begin[0]} and {begin[1]} both begin from random weights: leave one out"
        if swap and not start:
            yield "swap_head comes before finetune: give that too, or leave swap_head out"
        if swap and not (first or swap.model):
            yield (
                "swap_head needs a model: add pretrain, masked_patch or masked_autoencoder, or name a model folder: "
                "swap_head.model"
            )
        if swap and first and swap.model:
            yield f"swap_head.model and {first} both give the model to start from: leave one out"
        if swap and swap.head == "kept" and first and first != "pretrain":
            yield f"swap_head.head is kept, but {first} has no head for classes: set head to new"
        if swap and swap.head == "kept" and self.pretrain and self.pretrain.head != "linear":
            yield f"swap_head.head is kept, but pretrain.head is {self.pretrain.head}: set pretrain.head to linear"
        if start == "swap_head" and not swap:
            yield "finetune.start is swap_head, but there is no swap_head stage: add one, or set start: scratch"
        if first and self.finetune and self.finetune.init_weights:
            yield f"finetune.init gives the weights to start from, and {first} trains others: leave one out"
        if start == "scratch" and swap:
            yield "finetune.start is scratch: leave out swap_head, whose model nothing would use"

    @property
    def first(self) -> StageName | None:
        """The stage that begins a pipeline, if one does."""
        return next((name for name in self.names if name not in ("swap_head", "finetune")), None)

    @property
    def names(self) -> tuple[StageName, ...]:
        return tuple(name for name in ALL_STAGES if getattr(self, name) is not None)

    @property
    def trained(self) -> tuple[StageName, ...]:
        """Stages that train: all but swap_head."""
        return tuple(name for name in self.names if isinstance(getattr(self, name), TrainStage))
