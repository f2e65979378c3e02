"""The recipe's keys: one typed description of everything a run depends on. Imports no torch.

Unknown keys are errors. Numbers that can be derived are not stored: micro-batch and accumulation follow from the
global batch and the world size (`stage_plan`).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from data_shards.vocabulary import EvalProtocol
from model.config import ModelConfig
from model.regularisation import Regularisation
from model.vocabulary import HeadKind, InitStyle, LossKind
from pipeline.recipe.data import AugmentConfig, DataConfig, OneSet, SomeSets
from pipeline.recipe.duration import DurationText, Strict
from pipeline.recipe.schedule import Decay
from pipeline.vocabulary import ALL_STAGES, OPTIMIZERS, OptimizerName, StageName

_MOST_IMAGES = 2**20  # of a batch
_MOST_PIXELS = 2**14  # of an image's side
_MOST_PATCHES = 2**20  # of an image
_MOST_SECONDS = 10**7
_LONGEST_NAME = 200  # file systems take 255 bytes, MLflow's server 250
_TAKEN_NAMES = ("mlartifacts", "mlflow.db", "table8.txt", "table8.json")  # beside the runs, in the folder of them all


class EngineConfig(Strict):
    """How the arithmetic is carried out; changes speed and memory, not what is learnt."""

    backend: Literal["deepspeed", "accelerate"] = "deepspeed"
    """deepspeed everywhere; accelerate (plain DDP) for debugging and as the yardstick."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What DeepSpeed shards: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """bf16 and fp16 keep float32 master weights; fp16 needs a GPU."""
    max_micro_batch_size: int = Field(default=256, ge=1, le=_MOST_IMAGES)
    """The most images of one process in one forward pass; more are accumulated."""
    activation_checkpointing: bool = False
    """Recompute the blocks in the backward pass: less memory, a third more arithmetic."""
    max_skipped_steps: int = Field(default=20, ge=1, le=10**9)
    """Steps in a row with a gradient that is not finite (and so skipped) before training stops."""
    collective_timeout_seconds: float = Field(default=1800, gt=0, le=_MOST_SECONDS)
    """How long a process waits for the others before one of them is considered dead."""
    hang_seconds: float = Field(default=900, ge=0, le=_MOST_SECONDS)
    """A process without progress for so long is named, and the run ends so that it can be restarted; 0: never."""
    slow_rank_factor: float = Field(default=2.0, gt=1)
    """A process whose own part of a step takes so many times as long as the others' is named."""
    slow_rank: Literal["report", "stop"] = "report"
    """What then: report it and go on; or stop: save, and end so that the run can be restarted elsewhere."""
    saving: Literal["background", "blocking"] = "background"
    """background: checkpoints are copied to host memory and written while training goes on; blocking: it waits."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> EngineConfig:
        if self.backend == "accelerate" and self.zero_stage > 1:
            self.refuse("zero_stage", means_nothing="to accelerate, which shards nothing")
        return self


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


class TrainStage(Strict):
    """What pre-training and fine-tuning have in common."""

    train: SomeSets
    """Shards to train on: a folder or URL, a mapping (see `ShardsConfig`), or a list of them to mix."""
    eval: OneSet
    """The held-out shards."""
    eval_protocol: EvalProtocol = "vit"
    """What is evaluated of an image. vit: all of it, squashed to the square; big_vision: resized, centre crop; timm:
    the same, bicubic."""
    eval_crop_share: float | None = Field(default=None, gt=0, le=1)
    """Crop's side over the resized short side; default 0.875 (big_vision: 224 of 256) or 0.9 (timm)."""
    image_size: int = Field(gt=0, le=_MOST_PIXELS)
    global_batch_size: int = Field(gt=0, le=_MOST_IMAGES)
    """Images of one optimizer step, over all processes."""
    duration: DurationText
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    augment: AugmentConfig = AugmentConfig()
    loss: LossKind = "softmax"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    stochastic_depth: float = Field(default=0.0, ge=0, lt=1)
    """Rate at the last block, falling linearly to 0 at the first."""
    patch_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the patches that a step leaves out; 0.5 halves the arithmetic (FLIP)."""
    unmasked_finish: DurationText = "0 steps"
    """How long, at the end, patch_dropout rests."""
    log_every: DurationText = "20 steps"
    """Between two points of the curve, which is when spikes and slow processes are looked for; 0: at the end alone."""
    eval_every: DurationText = "25%"
    """Between two evaluations; 0: at the end alone."""
    save_every: DurationText = "10%"
    """Between two checkpoints; one is also written by a signal and at the end."""
    save_every_minutes: float = Field(default=0.0, ge=0, le=_MOST_SECONDS)
    """Also a checkpoint whenever the last one is so old; 0: steps alone count."""
    keep_checkpoints: int = Field(default=2, ge=1, le=10**9)
    """The newest so many stay."""
    keep_every: DurationText = "0 steps"
    """Checkpoints are also written at multiples of this, and these stay for good."""
    keep_best: Literal["loss", "score"] | None = None
    """Checkpoints are also written after each evaluation, and the best by held-out loss or score (top-1) stays."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> TrainStage:
        if self.eval_protocol == "vit":
            self.refuse("eval_crop_share", means_nothing="to eval_protocol vit")
        if self.loss == "sigmoid" and self.label_smoothing >= 0.5:
            raise ValueError(
                f"label_smoothing {self.label_smoothing} turns the sigmoid's targets around: stay below 0.5"
            )
        if not self.patch_dropout:
            self.refuse("unmasked_finish", means_nothing="without patch_dropout")
        given = [each.weight is not None for each in self.train]
        if any(given) and not all(given):
            raise ValueError("train: give every set a weight, or none")
        if any(each.weight is not None for each in (self.eval, *(self.train if len(self.train) == 1 else ()))):
            raise ValueError("a weight means nothing to a single set of shards: leave it out")
        return self


class MaskedPatchStage(TrainStage):
    """Self-supervised pre-training: the colours of corrupted patches (ViT paper, appendix B.1.2); labels are not
    looked at."""

    init: InitStyle = "google"
    """Initial weights: Google's, or timm's."""

    @model_validator(mode="after")
    def _no_labels(self) -> MaskedPatchStage:
        why = "to masked patch prediction"
        self.refuse("loss", "label_smoothing", "patch_dropout", means_nothing=why)
        self.augment.refuse("mixup_alpha", "cutmix_alpha", means_nothing=why, group="augment.")
        return self


class PretrainStage(TrainStage):
    """Supervised pre-training with a head of one hidden layer."""

    head: HeadKind = "mlp"
    """mlp: one hidden layer (the paper); linear: none (Google's GAP models, and BiT's ResNets)."""
    head_bias: float = 0.0
    """Initial bias of the last layer; Google sets -10 (ImageNet-21k) with the sigmoid loss."""
    init: InitStyle = "google"
    """Initial weights: Google's, or timm's."""


class SwapHeadStage(Strict):
    """Drop the pre-training head, attach a zero-initialised linear layer for the classes of fine-tuning."""

    model: str | None = None
    """A model's folder (`shardvit import` makes them), in place of what an earlier stage left."""


class FinetuneStage(TrainStage):
    """Training of everything, usually at a higher resolution than before."""

    start: Literal["swap_head", "scratch"] = "swap_head"
    """From the swapped head's model, or from random weights with the same linear head (the comparison)."""
    init: InitStyle = "google"
    """Initial weights with start: scratch."""

    @model_validator(mode="after")
    def _init_is_used(self) -> FinetuneStage:
        if self.start == "swap_head":
            self.refuse("init", means_nothing="to start swap_head, which brings its weights")
        return self


class Stages(Strict):
    """The stages to run, in this order; those left out are not run."""

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


class Recipe(Strict):
    """A whole pipeline."""

    name: str
    """Name of the run folder and of the MLflow run."""
    experiment: str = Field(default="shardvit", min_length=1)
    """MLflow's experiment; the environment's MLFLOW_EXPERIMENT_NAME comes first."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    processes: Annotated[int, Field(ge=1, le=10**6)] | Literal["auto"] = "auto"
    """Processes that `shardvit run` starts on this machine; auto: one for each GPU, or one."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    engine: EngineConfig = EngineConfig()
    stages: Stages

    @field_validator("name")
    @classmethod
    def _name_of_a_folder(cls, name: str) -> str:
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"name has {len(name):,} characters: give at most {_LONGEST_NAME}")
        if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", name):
            near = re.sub("[^A-Za-z0-9._-]+", "-", name).strip("-._")
            raise ValueError(
                f"name is {name!r}: give letters (a to z), digits, '.', '_' and '-', a letter or digit first"
                + (f", such as {near}" if near else "")
            )
        if name.casefold().startswith(_TAKEN_NAMES):
            raise ValueError(f"name is {name!r}, which shardvit keeps for a file beside the runs: give another")
        return name

    @model_validator(mode="after")
    def _model_fits_stages(self) -> Recipe:
        stages = {
            name: stage for name in self.stages.names if isinstance(stage := getattr(self.stages, name), TrainStage)
        }
        for name, stage in stages.items():
            key, size = f"stages.{name}", stage.image_size
            try:
                grid = self.model.grid_size(size)
            except ValueError as error:
                raise ValueError(f"{key}.image_size: {error}") from None
            if grid**2 > _MOST_PATCHES:
                raise ValueError(
                    f"{key}.image_size: {size} pixels are {grid**2:,} patches, and a model takes {_MOST_PATCHES:,} at "
                    "most: take a smaller image_size, or larger patches"
                )
            try:
                Regularisation(stage.dropout, stage.stochastic_depth, stage.patch_dropout).check(self.model)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
            if isinstance(stage, MaskedPatchStage) and self.model.kind == "resnet":
                raise ValueError(
                    f"{key}: a pure ResNet has no patch embeddings to corrupt; take a Transformer or a hybrid, or "
                    "pre-train on labels, with stages.pretrain"
                )
            if isinstance(stage, MaskedPatchStage) and grid == 1:
                raise ValueError(
                    f"{key}.image_size: {size} pixels are a single patch, with nothing left to predict it from; take "
                    f"{2 * size}, or smaller patches"
                )
        sizes = {stage.image_size for stage in stages.values()}
        if self.model.position == "relative" and self.stages.swap_head and len(sizes) > 1:
            raise ValueError(
                "model.position relative is not defined at another resolution than it was trained at, and the stages' "
                f"image_size are {sorted(sizes)}: give them one, or take another position"
            )
        return self

    def lanes(self, stage: TrainStage) -> int:
        if self.data.lanes != "auto":
            return self.data.lanes
        return max(n for n in range(1, 257) if stage.global_batch_size % n == 0)

    def train_stage(self, name: StageName) -> TrainStage:
        """A stage that trains; KeyError if the recipe has none of that name, or it is swap_head."""
        stage = getattr(self.stages, name)
        if not isinstance(stage, TrainStage):
            raise KeyError(name)
        return stage
