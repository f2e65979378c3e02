"""The recipe's keys about the optimizer and its learning rate. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from pipeline.recipe.duration import DurationText, Strict
from pipeline.recipe.schedule import Decay
from pipeline.vocabulary import OPTIMIZERS, OptimizerName

_Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Strict):
    """AdamW or SGD with momentum; weight decay touches the kernels of linear and convolution layers only."""

    name: OptimizerName
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled and multiplied by the learning rate (torch's and the paper's unit, not big_vision's), for SGD too."""
    betas: tuple[_Share, _Share] = (0.9, 0.999)
    """AdamW's (ViT paper, section 4.1)."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """SGD's (ViT paper, table 4)."""
    clip_grad_norm: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> OptimizerConfig:
        others = {key for each in OPTIMIZERS.values() for key in each.keys} - {*OPTIMIZERS[self.name].keys}
        self.refuse(*sorted(others), means_nothing=f"to {self.name}")
        return self


class ScheduleConfig(Strict):
    """Warm-up and decay of the learning rate."""

    warmup: DurationText = "0 steps"
    decay: Decay = "cosine"
    end_lr: float = Field(default=0.0, ge=0)
    """Where the decay ends."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> ScheduleConfig:
        if self.decay == "constant":
            self.refuse("end_lr", means_nothing="to a constant learning rate")
        return self
