"""Recipe keys for the optimizer and its learning rate. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from shardvit.pipeline.own_code.by_path import OwnCode
from shardvit.pipeline.recipe.duration import DurationText, Strict, parse_duration
from shardvit.pipeline.recipe.vocabulary import OPTIMIZERS, MomentType, OptimizerName

_Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Strict):
    """Optimizer. By default all parameters share one learning rate, and only kernels decay."""

    name: OptimizerName
    """adamw: ViT paper. sgd: with momentum. adafactor: big_vision's variant. lamb: q, k and v of a block have a trust
    ratio each, as in flax. muon: timm's, with the three as one matrix. custom: the key `custom`, which implies it.
    lamb and muon need engine.zero_stage 2 or less, adafactor and custom 0."""
    custom: OwnCode | None = None
    """FILE:FUNCTION of your own: (parameter groups, lr) -> torch optimizer. Groups have params (name and parameter),
    weight_decay (decoupled: times the learning rate) and lr_scale. See docs/own-code.md."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled, also for SGD; only LAMB adds it to the update before scaling."""
    weight_decay_unit: Literal["lr", "schedule"] = "lr"
    """lr: multiply decay by the learning rate (ViT paper, torch). schedule: by the schedule only (1 at the peak),
    without layer and head factors (big_vision)."""
    weight_decay_on: Literal["kernels", "matrices", "matrices_and_tokens"] = "kernels"
    """kernels: linear and convolution kernels (big_vision). matrices: all parameters with two or more dimensions,
    such as the probe of attention pooling, except positions and tokens (timm), or except positions alone (MAE)."""
    head_weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the last layer's kernel; null: weight_decay. ViT-g uses 100 times weight_decay."""
    betas: tuple[_Share, _Share] = (0.9, 0.999)
    """For Adam (ViT paper, section 4.1), LAMB, and the AdamW inside Muon."""
    eps: float = Field(default=1e-8, gt=0)
    """For Adam; LAMB's default is 1e-6."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """For SGD (ViT paper, table 4) and Adafactor; Muon's default is 0.95."""
    first_moment: MomentType = "float32"
    """Storage type of Adam's first moment or the momentum. bf16: Google's recipes, and Adafactor's default."""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """Learning rate factor per layer, from the head (1) down to the embedding, as in timm."""
    head_lr_factor: float = Field(default=1.0, gt=0)
    frozen: tuple[str, ...] = ()
    """Parts not to train: trunk (all but the head), head, patch_embedding, positions, class_token, registers,
    distillation_token, or patterns of parameter names such as "blocks.0.*". They get no gradient or decay and do not
    count in the gradient norm."""
    clip_grad_norm: float = Field(default=1.0, ge=0)
    """Clip the global gradient norm to this; 0: no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, given: Any) -> Any:
        name = given.get("name") if isinstance(given, dict) else None
        if isinstance(given, dict) and given.get("custom") and name is None:
            return {**given, "name": "custom"}
        return {**OPTIMIZERS[name].defaults, **given} if isinstance(name, str) and name in OPTIMIZERS else given

    @model_serializer(mode="wrap")
    def _against_own_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Also without defaults, write what differs from the optimizer's own: lamb with eps 1e-8."""
        own = OPTIMIZERS[self.name].defaults.items()
        return handler(self) | {key: getattr(self, key) for key, value in own if getattr(self, key) != value}

    def problems(self) -> Iterator[str]:
        others = {key for each in OPTIMIZERS.values() for key in each.keys} - {*OPTIMIZERS[self.name].keys}
        yield from self.ignored(*sorted(others), why=f"with {self.name}")
        if self.name == "custom" and self.custom is None:
            yield "name custom needs custom: FILE:FUNCTION, which makes the optimizer"
        if not self.weight_decay and not self.head_weight_decay:
            on = () if self.name == "lamb" else ("weight_decay_on",)  # LAMB scales these parameters
            yield from self.ignored("weight_decay_unit", *on, why="without decay")
        if {"trunk", "head"} <= {*self.frozen}:
            yield "frozen names trunk and head, so nothing is left to train: leave one out"
        if "trunk" in self.frozen:
            yield from self.ignored("layer_decay", why="with a frozen trunk: the head's factor is 1")
        if "head" in self.frozen:
            yield from self.ignored("head_lr_factor", "head_weight_decay", why="on a frozen head")
        if self.name == "lamb":
            why = "with lamb, which scales update and decay together"
            yield from self.ignored("weight_decay_unit", why=why)

    @property
    def frozen_needs_model(self) -> bool:
        """True if `frozen` names a part that a model may lack; all have trunk and head."""
        return not {*self.frozen} <= {"trunk", "head"}

    @property
    def bytes_per_parameter(self) -> float:
        """Upper bound of the optimizer state."""
        return OPTIMIZERS[self.name].bytes_per_parameter(self.first_moment)


class ScheduleConfig(Strict):
    """Learning rate warm-up and decay."""

    warmup: DurationText = "0 steps"
    """Linear warm-up from zero."""
    decay: Decay = "cosine"
    """rsqrt: inverse square root of the steps since warm-up. wsd: constant until the cool-down."""
    end_lr: float = Field(default=0.0, ge=0)
    """Final learning rate of the decay or cool-down."""
    timescale: DurationText = "10000 steps"
    """rsqrt: time after warm-up until the rate is peak / sqrt(2)."""
    cooldown: DurationText = "0 steps"
    """rsqrt, wsd: length of the final linear decay to end_lr."""

    def problems(self) -> Iterator[str]:
        cools = parse_duration(self.cooldown).amount > 0
        if self.decay != "rsqrt":
            yield from self.ignored("timescale", why=f"with decay {self.decay}")
        elif not parse_duration(self.timescale).amount:
            yield "timescale is zero: give at least one step"
        elif not cools:
            yield from self.ignored("end_lr", why="with rsqrt without a cooldown")
        if self.decay == "wsd" and not cools:
            yield "decay wsd ends in a cooldown: give one, such as cooldown: 20%, or take constant"
        if self.decay in ("cosine", "linear"):
            yield from self.ignored("cooldown", why=f"with decay {self.decay}, which never stops falling")
        if self.decay == "constant":
            yield from self.ignored("end_lr", "cooldown", why="with decay constant: take decay wsd")


Decay = Literal["cosine", "linear", "rsqrt", "wsd", "constant"]


@dataclass(frozen=True)
class Schedule:
    """Warm-up times decay per optimizer step, as in Google's vision_transformer and big_vision.

    Warm-up starts from zero, so the first step changes nothing. p: progress after warm-up, 0 to 1.

        cosine    end + (peak - end) (1 + cos(pi p)) / 2
        linear    end + (peak - end) (1 - p)
        rsqrt     peak / sqrt(1 + steps since warm-up / timescale)  (Zhai et al., Scaling Vision Transformers)
        wsd       peak: warm-up, stable, decay (Hu et al., MiniCPM)
        constant  peak

    rsqrt and wsd end in a cool-down: linear to `end_lr`, reached one step after the last.
    """

    peak_lr: float = 0.0
    total_steps: int = 1
    warmup_steps: int = 0
    decay: Decay = "constant"
    end_lr: float = 0.0  # of linear (Google: 1e-5), cosine and cool-down
    timescale_steps: int = 10_000  # of rsqrt
    cooldown_steps: int = 0  # of rsqrt and wsd

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        decaying_steps = max(1, self.total_steps - self.warmup_steps)
        decayed_steps = max(0, step - self.warmup_steps)
        progress = min(1.0, decayed_steps / decaying_steps)
        match self.decay:
            case "cosine":
                decayed = self.end_lr + (self.peak_lr - self.end_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
            case "linear":
                decayed = self.end_lr + (self.peak_lr - self.end_lr) * (1.0 - progress)
            case "rsqrt":
                decayed = self.peak_lr / math.sqrt(1.0 + decayed_steps / self.timescale_steps)
            case "wsd" | "constant":
                decayed = self.peak_lr
        if self.cooldown_steps:
            left = min(1.0, max(0.0, (self.total_steps - step) / self.cooldown_steps))
            decayed = self.end_lr + (decayed - self.end_lr) * left
        warmup = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return decayed * warmup
