"""Recipe keys that all training stages share. No torch."""

import difflib
import re
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, Field, model_validator

from shardvit.data_shards.vocabulary import EvalProtocol
from shardvit.model.config import Regularisation
from shardvit.model.vocabulary import (
    LOSSES,
    DropoutMasks,
    HeadKind,
    InitStyle,
    LossKind,
    SelfSupervised,
    StochasticDepthRule,
)
from shardvit.pipeline.own_code.by_path import OwnCode
from shardvit.pipeline.recipe.data import OneSet, SomeSets, several, without_secrets
from shardvit.pipeline.recipe.duration import DurationText, Strict
from shardvit.pipeline.recipe.optimizer import OptimizerConfig, ScheduleConfig
from shardvit.pipeline.recipe.stages.augment import AugmentConfig
from shardvit.pipeline.recipe.stages.image_growth import ImageSize, growth_of
from shardvit.pipeline.recipe.stages.teaching import DistillConfig
from shardvit.pipeline.recipe.vocabulary import (
    METRICS,
    OF_SEVERAL_LABELS,
    EvalMetric,
    WeightsKind,
)

MOST_SECONDS = 10**7
_MOST_IMAGES = 2**20  # of a batch
StageHead = HeadKind | SelfSupervised
_STYLES = get_args(InitStyle)


def _style_or_source(given: str) -> str:
    near = difflib.get_close_matches(given.casefold(), _STYLES, n=1)
    if given not in _STYLES and near and re.fullmatch(r"[\w-]+", given):
        raise ValueError(f"init {given!r}: did you mean {near[0]}? For weights of that name give ./{given}")
    return without_secrets(given)


Init = Annotated[str, Field(min_length=1), AfterValidator(_style_or_source)]
SetName = Annotated[str, Field(pattern="^[a-z0-9_]+$", max_length=40)]


class EmaConfig(Strict):
    """Moving average of the weights (EMA), starting at their initial values. After each applied step:
    average <- decay * average + (1 - decay) * weights."""

    decay: float = Field(default=0.9999, gt=0, lt=1)
    """The average spans about 1 / (1 - decay) steps; ViT paper, table 2: 0.9999."""
    warmup: Literal["none", "tensorflow", "timm"] = "none"
    """Smaller decay at first, so that short runs forget their initial weights: after n updates
    min(decay, (1 + n) / (10 + n)) (tensorflow) or min(decay, 1 - (1 + n)^(-2/3)) (timm)."""
    model: WeightsKind = "ema"
    """Weights that become the stage's model and count for keep_best; both are always evaluated and saved."""


class RollbackConfig(Strict):
    """When to roll back to an earlier checkpoint and skip the batches that caused trouble."""

    after_skipped_steps: int = Field(default=3, ge=1, le=10**9)
    """Roll back after this many steps in a row without a finite gradient."""
    spike_sigmas: float | None = Field(default=None, ge=1)
    """Also roll back if a loss is this many standard deviations above the mean of the 128 before it (OLMo-core: 6);
    null: only report spikes. Checked every log_every."""
    steps_before: int = Field(default=100, ge=0, le=10**9)
    """Also skip this many batches before the trouble, as an earlier step ruined the weights (PaLM, section 5.1)."""
    times: int = Field(default=3, ge=1, le=10**6)
    """Stop training after this many rollbacks in a stage."""


class OwnLossConfig(Strict):
    """A loss of your own."""

    custom: OwnCode
    """FILE:FUNCTION: (float32 logits [B, C], targets) -> the mean, or a loss per image [B]. Targets are classes, int64
    [B], or with mixing or several labels shares, float32 [B, C]. See docs/own-code.md."""
    probabilities: LossKind = "softmax"
    """Probabilities of predictions and of val/loss (a cross-entropy); sigmoid takes several labels per image."""


class TrainStage(Strict):
    """Keys shared by all training stages."""

    data: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] | None = None
    """Role of the data set, such as imagenet21k, for which the user names shards (see `roles`)."""
    train: SomeSets | None = None
    """Shards to train on: a folder or URL, a mapping (see `ShardsConfig`), or a list of them to mix."""
    eval: OneSet | None = None
    """The held-out shards."""
    eval_overlap: Literal["refuse", "allow"] = "refuse"
    """allow: eval may contain training images, so scores measure memorisation."""
    hold_out: float | None = Field(default=None, gt=0, lt=1, strict=True)
    """Hold out this share of the training images and evaluate it as also_eval.minival; 0.01: big_vision's train[:99%].
    Becomes `part` and `hold_out` of that set once train is known."""
    also_eval: dict[SetName, OneSet] = Field(default={})
    """More held-out sets by name, evaluated together with eval: {new: SHARDS} gives val_new/top1 and so on."""
    eval_protocol: EvalProtocol = "vit"
    """Evaluation preprocessing. vit: squash the image to a square; big_vision: resize and centre crop; timm: the same,
    bicubic. vit_exact and big_vision_exact reproduce the pixels of Google's resize."""
    eval_crop_share: float | None = Field(default=None, gt=0, le=1)
    """Crop size over resized short side; default: 0.875 (big_vision: 224 of 256) or 0.9 (timm)."""
    image_size: ImageSize
    """Side of the square images, in pixels; {from: 128, to: 224, over: 60%, steps: 4}: of images that grow during the
    stage (`ImageGrowth`)."""
    global_batch_size: int = Field(gt=0, le=_MOST_IMAGES)
    """Images per optimizer step, over all processes."""
    duration: DurationText
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig | None = None
    augment: AugmentConfig = AugmentConfig()
    loss: LossKind | OwnLossConfig = "softmax"
    """sigmoid: summed over the classes (Google's); bce: their mean, and smoothing as for softmax (timm's, DeiT's)."""
    task: OwnCode | None = None
    """FILE:CLASS of your own, for a loss that needs more than logits and labels, such as distillation or rotations: a
    subclass of `Classification`. See docs/own-code.md."""
    callbacks: tuple[OwnCode, ...] = ()
    """FILE:CLASS each, told after each step and evaluation and before each checkpoint. See docs/own-code.md."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    target_threshold: float | None = Field(default=None, ge=0, lt=1)
    """loss bce: a class counts in full if its share of the target is above this, else not at all; DeiT III: 0 (each
    class of a mixed image), ResNet strikes back: 0.2."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    stochastic_depth: float = Field(default=0.0, ge=0, lt=1)
    """Drop rate of the last block; stochastic_depth_rule says how it falls towards the first."""
    stochastic_depth_rule: StochasticDepthRule = "linear"
    """linear: falls to 0 at the first block; uniform: the same rate in all blocks (DeiT III)."""
    patch_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of patches that a step drops; 0.5 halves the compute (FLIP)."""
    unmasked_finish: DurationText = "0 steps"
    """Length of a final phase without patch_dropout."""
    dropout_masks: DropoutMasks = "sample"
    """Random masks of the three dropouts. sample: by seed, step and place in the global batch, so the same for any
    number of processes; process: by seed, step and process."""
    rollback: RollbackConfig | None = None
    """null: skip steps without a finite gradient, report spikes, and continue."""
    log_every: DurationText = "20 steps"
    """Interval of logging and of checks for spikes and slow processes; 0: only at the end."""
    eval_every: DurationText = "25%"
    """Interval of evaluations; 0: only at the end."""
    metrics: tuple[EvalMetric | OwnCode, ...] | Literal["auto"] = "auto"
    """Metrics besides loss and top-1. auto: top5 and calibration_error, or precision_at_1 for images with several
    labels. mean_average_precision keeps images x classes x 4 bytes over all processes, most on disk. FILE:NAME of your
    own: a function (outputs, targets) -> a value per image, or a class; alone, they come on top of auto's. See
    docs/own-code.md."""
    save_every: DurationText = "10%"
    """Interval of checkpoints; also written on a signal and at the end."""
    save_every_minutes: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Also write a checkpoint when the last one is this many minutes old; 0: never."""
    keep_checkpoints: int = Field(default=2, ge=1, le=10**9)
    """Keep this many of the newest checkpoints."""
    keep_every: DurationText = "0 steps"
    """Also write checkpoints at multiples of this and keep them all."""
    keep_best: Literal["loss", "score"] | Annotated[str, Field(pattern="^[A-Za-z_]")] | None = None
    """Also write a checkpoint after each evaluation and keep the best by held-out loss or score (top-1), or by one of
    your own metrics (the smallest if its name ends in loss)."""

    @model_validator(mode="before")
    @classmethod
    def _parts_of_train(cls, given: Any) -> Any:
        share = given.get("hold_out") if isinstance(given, dict) else None
        if not isinstance(share, float) or not 0 < share < 1 or given.get("train") is None:
            return given
        sets = several(given["train"])
        if len(sets) != 1 or not isinstance(sets[0], dict) or "part" in sets[0]:
            raise ValueError("hold_out is of one set that names no part: set hold_out: null, and give train's parts")
        rest, held_out = ({**sets[0], "part": part, "hold_out": share} for part in ("rest", "held_out"))
        also_eval = {"minival": held_out, **(given.get("also_eval") or {})}
        return {**given, "train": rest, "also_eval": also_eval, "hold_out": None}

    @property
    def head_kind(self) -> StageHead:
        return "linear"

    @property
    def init_style(self) -> InitStyle:
        """Initialisation of the weights that are not loaded."""
        style = getattr(self, "init", "google")
        return cast("InitStyle", style) if style in _STYLES else "google"

    @property
    def init_weights(self) -> str | None:
        """Source of the weights to start from."""
        source: str | None = getattr(self, "init", None)
        return None if source in _STYLES else source

    @property
    def distillation(self) -> DistillConfig | None:
        """The key `distill` of the stages that have it."""
        return getattr(self, "distill", None)

    @property
    def regularisation(self) -> Regularisation:
        return Regularisation(
            self.dropout,
            self.stochastic_depth,
            self.patch_dropout,
            masks=self.dropout_masks,
            depth_rule=self.stochastic_depth_rule,
        )

    @property
    def draws_in_blocks(self) -> bool:
        """True if blocks draw from the process's random generator in training."""
        return self.dropout_masks == "process" and bool(self.dropout or self.stochastic_depth)

    @property
    def loss_kind(self) -> LossKind:
        """Probabilities: softmax of all logits, or sigmoid of each."""
        return self.loss.probabilities if isinstance(self.loss, OwnLossConfig) else self.loss

    @property
    def own_metrics(self) -> dict[str, OwnCode]:
        """The user's own metrics by name."""
        named = () if self.metrics == "auto" else self.metrics
        return {each.rpartition(":")[2]: each for each in named if ":" in each}

    @property
    def built_in_metrics(self) -> tuple[EvalMetric, ...] | Literal["auto"]:
        if self.metrics == "auto" or len(self.own_metrics) == len(self.metrics) > 0:
            return "auto"
        known: tuple[EvalMetric, ...] = get_args(EvalMetric)
        return tuple[EvalMetric, ...](each for each in known if self.metrics.count(each))

    def problems_with_channels(self, channels: int, *, key: str) -> Iterator[str]:
        """What knows colours alone, for images that are read as `channels` channels."""
        for name in self.augment.of_colours:
            yield f"{key}.augment.{name} is for colours of 8 bits, not for images of {channels} channels: leave it out"
        if self.head_kind == "masked_patch":
            yield (
                f"{key} predicts three colours of 8 bits, not {channels} channels: take stages.masked_autoencoder, or "
                "stages.pretrain"
            )

    def problems(self) -> Iterator[str]:
        if self.eval_protocol in ("vit", "vit_exact"):
            yield from self.ignored("eval_crop_share", why=f"with eval_protocol {self.eval_protocol}")
        size, resize = self.image_size, self.augment.resize_size
        if resize is not None and resize < size:
            yield f"augment.resize_size {resize} is smaller than the crop's image_size {size}: give at least {size}"
        if isinstance(self.loss, OwnLossConfig):
            yield from self.ignored("label_smoothing", why="on a loss of your own, which may smooth its targets")
        elif self.label_smoothing >= (bound := LOSSES[self.loss].smoothing_below):
            yield f"label_smoothing {self.label_smoothing} inverts {self.loss}'s targets: stay below {bound:g}"
        if self.loss != "bce":
            yield from self.ignored("target_threshold", why="on a loss other than bce")
        if not self.stochastic_depth:
            yield from self.ignored("stochastic_depth_rule", why="without stochastic_depth")
        if not self.patch_dropout:
            yield from self.ignored("unmasked_finish", why="without patch_dropout")
        if not (self.dropout or self.stochastic_depth or self.patch_dropout):
            why = "without dropout, stochastic_depth or patch_dropout"
            yield from self.ignored("dropout_masks", why=why)
        metrics = () if self.metrics == "auto" else self.metrics
        for each in metrics:
            if metrics.count(each) > 1:
                yield f"metrics names {each} twice: once is enough"
            if each in OF_SEVERAL_LABELS and not LOSSES[self.loss_kind].takes_several_labels:
                yield f"metrics: {each} needs several labels per image, unlike loss {self.loss_kind}: leave it out"
        for name in self.own_metrics:
            if f"val/{name}" in METRICS or name.startswith("ema_"):
                yield f"metrics: val/{name} is a metric of shardvit's own: give your function another name"
        if len(self.own_metrics) < sum(":" in each for each in metrics):
            yield "metrics: two of your own have the same name: rename one"
        if len({each.rpartition(":")[2] for each in self.callbacks}) < len(self.callbacks):
            yield "callbacks: two have the same name, by which checkpoints know their states: rename one"
        if self.keep_best not in (None, "loss", "score", *self.own_metrics):
            own = ", or a metric of your own" + "".join(f", {name}" for name in self.own_metrics)
            yield f"keep_best is {self.keep_best!r}: give loss or score{own}"
        if self.distillation:
            yield from self._distill_problems(self.distillation)
        yield from self._set_problems()

    def _distill_problems(self, distill: DistillConfig) -> Iterator[str]:
        if self.task is not None:
            yield "distill has no effect with a task of your own, whose loss it is: leave it out"
        if distill.kind == "feature" and self.patch_dropout:
            yield "distill.kind feature compares all patches, and patch_dropout leaves some out: leave it out"
        if distill.kind == "feature" and growth_of(self.image_size):
            yield "distill.kind feature compares patch by patch, and image_size grows: give it one size, or take soft"
        if distill.share == 1:
            why = "with distill.share 1, which does not use labels"
            yield from self.ignored("label_smoothing", "target_threshold", why=why)

    def _set_problems(self) -> Iterator[str]:
        missing = [key for key in ("train", "eval") if getattr(self, key) is None]
        if missing and self.data is None:
            keys = " and ".join(missing)
            yield f"{keys} must be given: folders or URLs of shards, or data, a role such as imagenet"
        if "val" in self.also_eval:
            yield "also_eval.val: val names the metrics of eval: give this set another name"
        train, held_out = self.train or (), {f"also_eval.{name}": each for name, each in self.also_eval.items()}
        weighted = [each for each in train if each.weight is not None]
        if 0 < len(weighted) < len(train):
            yield "train: give every set a weight, or none"
        if self.eval:
            held_out["eval"] = self.eval
        if any(each.weight is not None for each in held_out.values()) or (weighted and len(train) == 1):
            yield "a weight has no effect on a single set of shards: leave it out"
        for one, (key, of) in product(train, held_out.items()):
            if one.shards != of.shards:
                continue
            if one.part and of.part and one.hold_out != of.hold_out:
                yield (
                    f"train holds out {one.hold_out} of {one.shards}, and {key} {of.hold_out}, so that images are in "
                    "both: give them the same hold_out"
                )
            if of.part == "held_out" and not one.part:
                yield (
                    f"{key} is held out of {of.shards}, and train has all its images: give train part: rest and "
                    f"hold_out: {of.hold_out}, too"
                )

    def judged_by(self, score: str) -> str:
        """Name the held-out metric of the model's weights (plain or EMA); `score`: loss, top1 or accuracy."""
        average = self.ema is not None and self.ema.model == "ema"
        return f"val/{'ema_' if average else ''}{score}"
