"""The recipe's keys of each stage, and which stages go together. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from data_shards.vocabulary import EvalProtocol
from model.vocabulary import LOSSES, DropoutMasks, HeadKind, InitStyle, LossKind
from pipeline.recipe.data import MOST_SIDE, AugmentConfig, FewShotConfig, OneSet, SomeSets, several
from pipeline.recipe.duration import DurationText, Strict
from pipeline.recipe.optimizer import OptimizerConfig, ScheduleConfig
from pipeline.recipe.vocabulary import ALL_STAGES, OF_SEVERAL_LABELS, EvalMetric, StageName, WeightsKind

MOST_SECONDS = 10**7
_MOST_IMAGES = 2**20  # of a batch
SetName = Annotated[str, Field(pattern="^[a-z0-9_]+$", max_length=40)]


class EmaConfig(Strict):
    """A moving average of the weights (EMA, Polyak averaging), starting from their initial values:
    average <- decay * average + (1 - decay) * weights, after each applied step."""

    decay: float = Field(default=0.9999, gt=0, lt=1)
    """The average spans about 1 / (1 - decay) steps; 0.9999 in table 2 of the ViT paper."""
    warmup: Literal["none", "tensorflow", "timm"] = "none"
    """Use a smaller decay at first, so that short runs forget their initial weights: min(decay, (1 + n) / (10 + n))
    after n updates (tensorflow), or min(decay, 1 - (1 + n)^(-2/3)) (timm)."""
    model: WeightsKind = "ema"
    """Weights that become the stage's model and that keep_best compares; both are always evaluated and saved."""


class RollbackConfig(Strict):
    """When to roll back to an earlier checkpoint and skip the batches that caused trouble."""

    after_skipped_steps: int = Field(default=3, ge=1, le=10**9)
    """Roll back after this many steps in a row without a finite gradient."""
    spike_sigmas: float | None = Field(default=None, ge=1)
    """Also roll back when a loss is this many standard deviations above the mean of the 128 before it (OLMo-core: 6);
    null: only report spikes. Checked every log_every."""
    steps_before: int = Field(default=100, ge=0, le=10**9)
    """Also skip this many batches before the trouble (PaLM, section 5.1): a skipped step changed nothing, so an earlier
    one ruined the weights."""
    times: int = Field(default=3, ge=1, le=10**6)
    """Stop training instead after this many rollbacks in a stage."""


class TrainStage(Strict):
    """Keys shared by all training stages."""

    data: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] | None = None
    """Role of the data set, such as imagenet21k; the user says where its shards are (see `roles`)."""
    train: SomeSets | None = None
    """Shards to train on: a folder or URL, a mapping (see `ShardsConfig`), or a list of them to mix."""
    eval: OneSet | None = None
    """The held-out shards."""
    eval_overlap: Literal["refuse", "allow"] = "refuse"
    """allow: eval may contain training images; scores then measure memorisation."""
    hold_out: float | None = Field(default=None, gt=0, lt=1, strict=True)
    """Hold this share of the training images out and evaluate it as also_eval.minival; 0.01 gives big_vision's
    train[:99%]. Once train is known, this turns into `part` and `hold_out` of that set."""
    also_eval: dict[SetName, OneSet] = Field(default={})
    """More held-out sets by name, evaluated together with eval: {new: SHARDS} gives val_new/top1 and so on."""
    eval_protocol: EvalProtocol = "vit"
    """How evaluation preprocesses an image. vit: squash all of it to a square; big_vision: resize and centre crop;
    timm: the same, bicubic. vit_exact and big_vision_exact reproduce the pixels of Google's own resize."""
    eval_crop_share: float | None = Field(default=None, gt=0, le=1)
    """Crop size over resized short side; default: 0.875 (big_vision: 224 of 256) or 0.9 (timm)."""
    image_size: int = Field(gt=0, le=MOST_SIDE)
    global_batch_size: int = Field(gt=0, le=_MOST_IMAGES)
    """Images per optimizer step, over all processes."""
    duration: DurationText
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig | None = None
    """Moving average of the weights; null: none."""
    augment: AugmentConfig = AugmentConfig()
    loss: LossKind = "softmax"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    stochastic_depth: float = Field(default=0.0, ge=0, lt=1)
    """Drop rate of the last block, falling linearly to 0 at the first."""
    patch_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of patches that a step drops; 0.5 halves the compute (FLIP)."""
    unmasked_finish: DurationText = "0 steps"
    """Length of a final phase without patch_dropout."""
    dropout_masks: DropoutMasks = "sample"
    """Random masks of the three dropouts. sample: by seed, step and the image's place in the global batch, so identical
    on any number of processes; process: by seed, step and process."""
    rollback: RollbackConfig | None = None
    """Default: skip steps without a finite gradient, report spikes, and continue."""
    log_every: DurationText = "20 steps"
    """Interval of logging and of checks for spikes and slow processes; 0: only at the end."""
    eval_every: DurationText = "25%"
    """Interval of evaluations; 0: only at the end."""
    metrics: tuple[EvalMetric, ...] | Literal["auto"] = "auto"
    """Metrics besides loss and top-1. auto: top5 and calibration_error, or precision_at_1 for images with several
    labels. mean_average_precision keeps all scores: images x classes x 4 bytes over all processes."""
    save_every: DurationText = "10%"
    """Interval of checkpoints; also written on a signal and at the end."""
    save_every_minutes: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """Also write a checkpoint when the last one is this many minutes old; 0: never."""
    keep_checkpoints: int = Field(default=2, ge=1, le=10**9)
    """Keep this many of the newest checkpoints."""
    keep_every: DurationText = "0 steps"
    """Also write checkpoints at multiples of this, and keep them forever."""
    keep_best: Literal["loss", "score"] | None = None
    """Also write a checkpoint after each evaluation, and keep the best one by held-out loss or score (top-1)."""

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
    def draws_in_blocks(self) -> bool:
        """True if blocks draw from the generator of the process during training."""
        return self.dropout_masks == "process" and bool(self.dropout or self.stochastic_depth)

    @model_validator(mode="after")
    def _nothing_ignored(self) -> TrainStage:
        if self.eval_protocol in ("vit", "vit_exact"):
            self.refuse("eval_crop_share", means_nothing=f"to eval_protocol {self.eval_protocol}")
        if self.augment.resize_size is not None and self.augment.resize_size < self.image_size:
            raise ValueError(
                f"augment.resize_size {self.augment.resize_size} is smaller than the square of image_size "
                f"{self.image_size} that is cut out of it: give at least {self.image_size}"
            )
        if self.label_smoothing >= (bound := LOSSES[self.loss].smoothing_below):
            raise ValueError(
                f"label_smoothing {self.label_smoothing} turns {self.loss}'s targets around: stay below {bound:g}"
            )
        if not self.patch_dropout:
            self.refuse("unmasked_finish", means_nothing="without patch_dropout")
        if not (self.dropout or self.stochastic_depth or self.patch_dropout):
            self.refuse("dropout_masks", means_nothing="without dropout, stochastic_depth or patch_dropout")
        missing = [key for key in ("train", "eval") if getattr(self, key) is None]
        if missing and self.data is None:
            raise ValueError(
                f"{' and '.join(missing)} must be given: folders or URLs of shards, or data, a role such as imagenet"
            )
        given = [each.weight is not None for each in self.train or ()]
        if any(given) and not all(given):
            raise ValueError("train: give every set a weight, or none")
        held_out = ([("eval", self.eval)] if self.eval else []) + [
            (f"also_eval.{name}", each) for name, each in self.also_eval.items()
        ]
        alone = [each for _, each in held_out]
        if any(each.weight is not None for each in (*alone, *(self.train or ())[: len(given) == 1])):
            raise ValueError("a weight means nothing to a single set of shards: leave it out")
        for each in self.train or ():
            for key, of in held_out:
                if each.part and of.part and each.shards == of.shards and each.hold_out != of.hold_out:
                    raise ValueError(
                        f"train holds out {each.hold_out} of {each.shards}, and {key} {of.hold_out}, so that images "
                        "are in both: give them the same hold_out"
                    )
                if of.part == "held_out" and not each.part and each.shards == of.shards:
                    raise ValueError(
                        f"{key} is held out of {of.shards}, and train has all its images: give train part: rest and "
                        f"hold_out: {of.hold_out}, too"
                    )
        if "val" in self.also_eval:
            raise ValueError("also_eval.val: val is what the metrics of eval are called: give this set another name")
        if self.metrics != "auto":
            double = [each for each in self.metrics if self.metrics.count(each) > 1]
            if double:
                raise ValueError(f"metrics names {double[0]} twice: once is enough")
            several = [each for each in self.metrics if each in OF_SEVERAL_LABELS]
            if several and not LOSSES[self.loss].takes_several_labels:
                raise ValueError(
                    f"metrics: {several[0]} is for images with several labels, which loss {self.loss} cannot learn: "
                    "leave it out"
                )
        return self

    def judged_by(self, score: str) -> str:
        """Name the held-out metric of the weights that become the stage's model; `score`: loss, top1 or accuracy."""
        average = self.ema is not None and self.ema.model == "ema"
        return f"val/{'ema_' if average else ''}{score}"


class MaskedPatchStage(TrainStage):
    """Self-supervised pre-training: predict the colours of corrupted patches (ViT paper, appendix B.1.2). Ignores
    labels."""

    init: InitStyle = "google"
    """Initial weights as in vision_transformer (google), big_vision (other learned positions) or timm."""

    @model_validator(mode="after")
    def _no_labels(self) -> MaskedPatchStage:
        why = "to masked patch prediction"
        self.refuse("loss", "label_smoothing", "patch_dropout", "metrics", means_nothing=why)
        self.augment.refuse("mixup_alpha", "cutmix_alpha", means_nothing=why, group="augment.")
        return self


class PretrainStage(TrainStage):
    """Supervised pre-training, by default with a head of one hidden layer."""

    head: HeadKind = "mlp"
    """mlp: one hidden layer (ViT paper); linear: none (Google's GAP models, BiT's ResNets)."""
    head_bias: float = 0.0
    """Initial bias of the last layer; Google uses -10 with the sigmoid loss (ImageNet-21k)."""
    init: InitStyle = "google"
    """Initial weights as in vision_transformer (google), big_vision (other learned positions) or timm."""
    few_shot: tuple[FewShotConfig, ...] = Field(default=(), max_length=100)
    """Small data sets for few-shot accuracy at evaluations."""

    @model_validator(mode="after")
    def _few_shot_sets_differ(self) -> PretrainStage:
        names = [each.name for each in self.few_shot]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"few_shot names {twice[0]} twice: give each set a name of its own")
        return self


class SwapHeadStage(Strict):
    """Replace the pre-training head with a zero-initialised linear layer for the classes of fine-tuning."""

    model: str | None = None
    """Start from this model folder (made by `shardvit import`) instead of an earlier stage. A recipe without `model`
    takes it from the folder."""


class FinetuneStage(TrainStage):
    """Training of all weights, usually at a higher resolution."""

    start: Literal["swap_head", "scratch"] = "swap_head"
    """swap_head: start from that stage's model; scratch: from random weights with the same linear head."""
    init: InitStyle = "google"
    """Initial weights with start: scratch."""

    @model_validator(mode="after")
    def _init_is_used(self) -> FinetuneStage:
        if self.start == "swap_head":
            self.refuse("init", means_nothing="to start swap_head, which brings its weights")
            if "head" in self.optimizer.frozen:
                raise ValueError(
                    "optimizer.frozen names the head, which swap_head leaves at zero, so that no gradient would pass "
                    "it and nothing would be learnt: leave it out"
                )
        return self


class Stages(Strict):
    """Stages to run, in this order; omitted stages are not run."""

    masked_patch: MaskedPatchStage | None = None
    pretrain: PretrainStage | None = None
    swap_head: SwapHeadStage | None = None
    finetune: FinetuneStage | None = None

    @model_validator(mode="after")
    def _chain(self) -> Stages:
        first = "masked_patch" if self.masked_patch else "pretrain" if self.pretrain else None
        swap, finetune = self.swap_head, self.finetune
        start = finetune.start if finetune else None
        for wrong, sentence in (
            (not self.names, "at least one of masked_patch, pretrain, swap_head and finetune is needed"),
            (
                self.masked_patch and self.pretrain,
                "masked_patch and pretrain both begin from random weights: leave one out",
            ),
            (swap and not finetune, "swap_head comes before finetune: give that too, or leave swap_head out"),
            (
                swap and not (first or swap.model),
                "swap_head needs a model: give a pretrain or masked_patch stage before it, or swap_head.model, a "
                "model's folder",
            ),
            (
                first and swap and swap.model,
                f"swap_head.model and {first} both give the model to start from: leave one out",
            ),
            (
                start == "swap_head" and not swap,
                "finetune.start is swap_head, but there is no swap_head stage: add one, or set start: scratch",
            ),
            (
                start == "scratch" and swap,
                "finetune.start is scratch: leave out swap_head, whose model nothing would use",
            ),
        ):
            if wrong:
                raise ValueError(sentence)
        return self

    @property
    def names(self) -> tuple[StageName, ...]:
        return tuple(name for name in ALL_STAGES if getattr(self, name) is not None)

    @property
    def trained(self) -> tuple[StageName, ...]:
        """The stages that train: all but swap_head."""
        return tuple(name for name in self.names if isinstance(getattr(self, name), TrainStage))
