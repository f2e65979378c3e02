"""Recipe keys: everything a run depends on, typed; unknown keys are errors. No torch."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from shardvit.model.config import ModelConfig
from shardvit.model.vocabulary import COLOUR_CHANNELS
from shardvit.pipeline.recipe.data import MOST_LANES, DataConfig
from shardvit.pipeline.recipe.duration import Strict
from shardvit.pipeline.recipe.stages.finetuning import Stages
from shardvit.pipeline.recipe.stages.image_growth import ImageGrowth, growth_of
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage, SelfSupervisedStage
from shardvit.pipeline.recipe.stages.train_stage import MOST_SECONDS, TrainStage
from shardvit.pipeline.recipe.vocabulary import OPTIMIZERS, AttentionKernel, SinkName, StageName

FEW_PROCESSES = 256  # most for which `data.lanes: auto` ignores their number
_MANY_LANES = 4096  # of auto, for more processes
_MOST_IMAGES = 2**20  # of a batch
_FP16_SKIPS = 17  # in a row, from the first scale of 2^16 down to 1
_MOST_PATCHES = 2**20  # of an image
_LONGEST_NAME = 200  # file systems take 255 bytes, MLflow's server 250
_LONGEST_MLFLOW_NAME = 250  # of a registered model and an alias
_MLFLOW_VERSION = re.compile("v[0-9]+", re.IGNORECASE)  # MLflow's own names of versions
_TAKEN_NAMES = ("mlartifacts", "mlflow.db")  # MLflow's, next to the runs


class WandbConfig(Strict):
    """Weights & Biases; its own variables (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR, ...) take precedence."""

    project: str | None = Field(default=None, min_length=1, max_length=128)
    """Project; the default is the recipe's experiment."""
    entity: str | None = Field(default=None, min_length=1, max_length=128)
    """User or team; the default is the login's."""


class TrackingConfig(Strict):
    """Where a run is sent; does not affect training."""

    to: tuple[SinkName, ...] = ("mlflow",)
    """Services that get the run: mlflow, tensorboard (event files in the run folder), wandb. []: none, files only."""
    mode: Literal["online", "offline"] = "online"
    """online: send during training; offline: send nothing until `shardvit sync`."""
    wandb: WandbConfig = WandbConfig()
    system_metrics: bool = False
    """Log CPU, memory, network, disk and GPU of each node to MLflow, every ten seconds, in a separate process; to W&B
    those of rank 0's node."""
    log_model: bool = True
    """Log the last stage's model to MLflow, loadable without shardvit; false: keep it only in the run folder."""
    register_as: str | None = Field(default=None, min_length=1, max_length=_LONGEST_MLFLOW_NAME)
    """Registered model that gets this model as its next version."""
    alias: str | None = Field(default=None, min_length=1, max_length=_LONGEST_MLFLOW_NAME)
    """Alias to move to that version, such as champion."""

    @field_validator("register_as")
    @classmethod
    def _name_of_a_model(cls, name: str | None) -> str | None:
        if name and re.search("[/:]", name):
            raise ValueError(f"register_as {name!r}: MLflow allows no '/' and no ':' in a model's name")
        return name

    @field_validator("alias")
    @classmethod
    def _name_of_an_alias(cls, alias: str | None) -> str | None:
        if alias and not re.fullmatch(r"[A-Za-z0-9_-]+", alias):
            raise ValueError(f"alias {alias!r}: give letters (a to z), digits, '_' and '-'")
        if alias and (_MLFLOW_VERSION.fullmatch(alias) or alias == "latest"):
            raise ValueError(f"alias {alias!r} is a version's own name in MLflow: give another")
        return alias

    def problems(self) -> Iterator[str]:
        if len(set(self.to)) < len(self.to):
            yield f"to {list(self.to)} names a service twice: name it once"
        if self.mode == "offline":
            yield from self.ignored("system_metrics", why="offline, as they are not kept to be sent later")
        elif not {"mlflow", "wandb"} & {*self.to}:
            yield from self.ignored("system_metrics", why="without mlflow or wandb in `to`")
        if not self.log_model:
            yield from self.ignored("register_as", why="if no model is logged")
        if self.register_as is None:
            yield from self.ignored("alias", why="without register_as")


class EngineConfig(Strict):
    """Engine, precision and kernels: what affects speed and memory, not the result."""

    backend: Literal["deepspeed", "accelerate"] = "deepspeed"
    """accelerate: plain DDP, for debugging and as a baseline."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """0: no sharding (torch's DDP). DeepSpeed: 1 shards optimizer state, 2 also gradients, 3 also weights."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """bf16 and fp16 keep float32 master weights; fp16 needs a GPU."""
    fp32_matmul: Literal["ieee", "tf32"] = "ieee"
    """float32 matrix products and convolutions on a GPU: ieee, or tf32 (10-bit mantissa). CPUs always use ieee."""
    compile: Literal["auto", "off", "blocks"] = "auto"
    """blocks: torch.compile each Transformer block; auto: blocks on GPUs with ZeRO 0 to 2, else off."""
    attention: AttentionKernel | Literal["auto"] = "auto"
    """Attention kernel; auto: the fastest known for this GPU, precision and shape."""
    deterministic: Literal["on", "off"] = "on"
    """on: bit-identical steps per kind of GPU, so exact resumes (CPUs: always); off: faster above 256 tokens."""
    max_micro_batch_size: int = Field(default=256, ge=1, le=_MOST_IMAGES)
    """Most images per process in a forward pass; larger batches use gradient accumulation."""
    activation_checkpointing: bool | Annotated[int, Field(ge=2, le=1000)] = False
    """true: recompute all blocks in the backward pass (less memory, a third more compute); k: every k-th block."""
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = "none"
    """Keep optimizer state (updated on the CPU; ZeRO 1 to 3) and parameters (copied to the GPU on use; ZeRO 3) in host
    memory. Much slower: only for models that do not fit otherwise."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Average gradients during the backward pass; auto: with several processes; off: after it, in one message. With
    fp16 or offload, DeepSpeed does it and waits for the GPU once per step."""
    bucket_elements: Annotated[int, Field(ge=2, multiple_of=2, le=2**31)] | Literal["auto"] = "auto"
    """Gradient elements averaged per message, at least a block's. Larger: fewer messages, less overlap, more memory.
    auto: 25 million, with more than 95 processes 262,144 for each."""
    max_skipped_steps: int = Field(default=20, ge=1, le=10**9)
    """Stop training after this many skipped steps (gradient not finite) in a row."""
    collective_timeout_seconds: float = Field(default=1800, gt=0, le=MOST_SECONDS)
    """Assume that a process is dead after waiting this long for it."""
    hang_seconds: float = Field(default=900, ge=0, le=MOST_SECONDS)
    """Report a process without progress for this long and end the run so that it can restart; 0: never."""
    slow_rank_factor: float = Field(default=2.0, gt=1)
    """Slow: the process's own part of a step takes this many times as long as the others'."""
    slow_rank_seconds: float = Field(default=2.0, gt=0, le=MOST_SECONDS)
    """Report a slow process once the others have waited this long; slow_rank stop acts after ten times as long."""
    slow_rank: Literal["report", "stop"] = "report"
    """report: name the slow process and continue; stop: save and end, to restart the run elsewhere."""
    saving: Literal["background", "blocking"] = "background"
    """background: copy checkpoints to host memory and write them while training continues; blocking: wait."""

    @model_validator(mode="before")
    @classmethod
    def _without_fp8(cls, tree: Any) -> Any:
        """Accept `experimental: {fp8: off}` from run folders of earlier versions."""
        if isinstance(tree, dict) and tree.get("experimental") in ({}, {"fp8": "off"}):
            return {key: value for key, value in tree.items() if key != "experimental"}
        return tree

    def problems(self) -> Iterator[str]:
        zero, offload = self.zero_stage, self.offload
        if self.precision != "fp32":
            why = f"with precision {self.precision}, which has no float32 products"
            yield from self.ignored("fp32_matmul", why=why)
        if self.compile == "blocks" and zero == 3:
            yield (
                "compile blocks needs zero_stage 0, 1 or 2, as ZeRO 3 gathers weights inside the blocks: set one of "
                "them, or leave compile out"
            )
        if self.backend == "accelerate":
            keys = ("offload", "overlap", "bucket_elements", *(["zero_stage"] if zero else []))
            yield from self.ignored(*keys, why="with accelerate, which is plain DDP")
        elif zero == 0:
            yield from self.ignored("overlap", why="under ZeRO 0, which always overlaps")
            if offload != "none":
                yield f"offload {offload} needs sharded optimizer state: set zero_stage to 1, 2 or 3"
        if offload == "optimizer_and_parameters" and zero < 3:
            yield f"offload {offload} is for ZeRO 3 alone: set zero_stage to 3, or offload to optimizer"

    def problems_with(self, model: ModelConfig) -> Iterator[str]:
        if model.kind == "resnet":
            what = "an own model" if model.custom is not None else "a pure ResNet"
            yield from self.ignored("attention", why=f"on {what}", group="engine.")
            if self.compile == "blocks":
                yield f"engine.compile blocks: {what} has no Transformer blocks that we know: leave it out"
            if model.custom is not None:
                yield from self.ignored("activation_checkpointing", why=f"on {what}, which can do so", group="engine.")
                return
        elif model.position == "relative" and self.attention in ("cudnn", "flash"):
            yield (
                f"engine.attention {self.attention} takes no learned bias, which model.position relative needs: set "
                "auto, efficient or math"
            )
        if (every := self.checkpointed_every) > (most := model.num_blocks):
            yield (
                f"engine.activation_checkpointing {every}: the model has {most} blocks, so only the first would be "
                f"recomputed: give 2 to {most}, or true for all"
            )

    def problems_in(self, stage: TrainStage, *, key: str) -> Iterator[str]:
        name, zero = stage.optimizer.name, self.zero_stage
        takes = OPTIMIZERS[name].takes if self.backend == "deepspeed" and zero > 0 else "pieces"
        if takes == "parameters":
            yield (
                f"{key}.optimizer.name: {name} takes whole parameters, and ZeRO {zero} cuts them into pieces: set "
                "engine.zero_stage to 0, or take adamw"
            )
        elif takes == "split" and zero == 3:
            yield (
                f"{key}.optimizer.name: {name} takes whole tensors, which we join under ZeRO 1 and 2, not 3: set "
                "engine.zero_stage to 1 or 2, or take adamw"
            )
        elif takes == "split" and (self.precision == "fp16" or self.offload != "none"):
            why = f"offload {self.offload}" if self.offload != "none" else "precision fp16"
            yield (
                f"{key}.optimizer.name: under ZeRO {zero} {name} does not go with engine.{why}: leave that out, or "
                "take adamw"
            )
        if self.compile == "blocks" and stage.draws_in_blocks:
            yield (
                f"{key}.dropout_masks process: compiled blocks would draw other numbers from the process's generator: "
                "take sample, or set engine.compile: off"
            )
        if stage.rollback is None:
            return
        steps, most = stage.rollback.after_skipped_steps, self.max_skipped_steps
        steps_key = f"{key}.rollback.after_skipped_steps {steps}"
        if steps > most:
            yield f"{steps_key} comes after engine.max_skipped_steps {most}, which stops training: make it smaller"
        if self.precision == "fp16" and steps < _FP16_SKIPS:
            yield (
                f"{steps_key}: with engine.precision fp16 the search for the loss scale skips steps, too: give at "
                f"least {_FP16_SKIPS}"
            )

    @property
    def checkpointed_every(self) -> int:
        """Recompute every n-th block; 0: none."""
        return int(self.activation_checkpointing)


class Recipe(Strict):
    """A whole pipeline."""

    name: str
    """Name of the run folder and of the MLflow run."""
    experiment: str = Field(default="shardvit", min_length=1)
    """MLflow experiment and W&B project; the environment variable MLFLOW_EXPERIMENT_NAME takes precedence."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    processes: Annotated[int, Field(ge=1, le=10**6)] | Literal["auto"] = "auto"
    """Processes that `shardvit run` starts on this machine; auto: one per GPU, or one."""
    pictures: Literal["auto", "off"] = "auto"
    """auto: a low-priority process on rank 0's host draws data, evaluations and the model during training; off: only
    `shardvit report` draws them."""
    tracking: TrackingConfig = TrackingConfig()
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
            raise ValueError(f"name is {name!r}, which shardvit uses for a file beside the runs: give another")
        return name

    def problems(self) -> Iterator[str]:
        stages = {name: self.train_stage(name) for name in self.stages.trained}
        yield from self.engine.problems_with(self.model)
        for name, stage in stages.items():
            yield from self.engine.problems_in(stage, key=f"stages.{name}")
            yield from self._model_problems(stage, key=f"stages.{name}")
            if self.model.channels != COLOUR_CHANNELS:
                yield from stage.problems_with_channels(self.model.channels, key=f"stages.{name}")
        yield from self.data.problems_with_channels(self.model.channels)
        if self.stages.masked_patch and self.data.normalisation is not None:
            yield "data.normalisation has no effect with masked_patch, which takes Google's: leave it out"
        if self.tracking.register_as is not None and isinstance([*stages.values()][-1], SelfSupervisedStage):
            yield (
                "tracking.register_as: the last stage's model was trained without labels and knows no classes: add "
                "stages.finetune, or leave register_as out"
            )
        sizes = {stage.image_size for stage in stages.values()}
        if self.model.position == "relative" and self.stages.swap_head and len(sizes) > 1:
            yield (
                "model.position relative is undefined at another resolution than in training, and the stages' "
                f"image_size are {sorted(sizes)}: give them one, or take another position"
            )

    def _model_problems(self, stage: TrainStage, *, key: str) -> Iterator[str]:
        size, masked = stage.image_size, isinstance(stage, SelfSupervisedStage)
        try:
            grid = self.model.grid_size(size)
        except ValueError as error:
            yield f"{key}.image_size: {error}"
            return
        if growth := growth_of(size):
            yield from self._growth_problems(growth, key=f"{key}.image_size", masked=masked)
        try:
            stage.regularisation.check(self.model)
        except ValueError as error:
            yield f"{key}: {error}"
        if grid**2 > _MOST_PATCHES:
            yield (
                f"{key}.image_size: {size} pixels are {grid**2:,} patches, more than {_MOST_PATCHES:,}: take a smaller "
                "image_size, or larger patches"
            )
        if stage.distillation and stage.distillation.kind == "feature" and self.model.kind == "resnet":
            yield f"{key}.distill.kind: feature needs a Transformer's tokens, which this model lacks: take soft"
        if self.model.kind == "vit" and self.model.distillation_token == "learned":
            if isinstance(stage, SelfSupervisedStage):
                yield f"{key}: model.distillation_token learns from a teacher of classes: leave it out"
            elif stage.head_kind != "linear":
                yield f"{key}: model.distillation_token has a linear head of its own: set {key}.head: linear"
            if stage.distillation and stage.distillation.kind == "feature":
                yield f"{key}.distill.kind feature teaches tokens, not model.distillation_token: leave that out"
        if self.model.custom is not None:
            if masked:
                yield f"{key}: an own model has no patch embeddings that we could corrupt: take stages.pretrain"
            own = ("head", "head_bias", *(() if stage.init_weights else ("init",)), "few_shot")
            why = "on an own model, whose code says it"
            yield from stage.ignored(*(each for each in own if hasattr(stage, each)), why=why, group=f"{key}.")
        if masked and self.model.kind == "resnet":
            yield (
                f"{key}: a pure ResNet has no patch embeddings to corrupt: take a Transformer or a hybrid, or "
                "pre-train on labels, with stages.pretrain"
            )
        if masked and grid == 1:
            yield (
                f"{key}.image_size: {size} pixels are a single patch, with no others to predict it from: take "
                f"{2 * size}, or smaller patches"
            )
        if isinstance(stage, MaskedAutoencoderStage) and self.model.kind == "vit":
            yield from self._autoencoder_problems(key)

    def _autoencoder_problems(self, key: str) -> Iterator[str]:
        model = self.model
        if model.position not in ("learned_1d", "sincos_2d") or model.position_at != "stem" or model.rope != "none":
            yield (
                f"{key} needs positions that are added once, before patches are left out: take model.position "
                f"learned_1d or sincos_2d, not {model.position} at {model.position_at}, and no rope"
            )
        if self.model.sizes.width % 4:
            yield f"{key} has fixed positions, which need a model.width that 4 divides, not {self.model.sizes.width}"

    def _growth_problems(self, growth: ImageGrowth, *, key: str, masked: bool) -> Iterator[str]:
        if self.model.custom is not None:
            yield f"{key}: an own model is built for images of one size: give one number"
            return
        if self.model.position == "relative":
            yield f"{key}: relative positions are undefined at another resolution: give one number, or another position"
        try:
            less, most = self.model.grid_size(growth.from_), self.model.grid_size(growth.to)
        except ValueError as error:
            yield f"{key}.from: {error}"
            return
        if growth.steps > most - less:
            yield (
                f"{key}.steps {growth.steps} are more sizes than there are between {growth.from_} and {growth.to} "
                f"pixels: give at most {most - less}"
            )
        if masked and less == 1:
            yield f"{key}.from: {growth.from_} pixels are a single patch, with no others to predict it from: take more"

    def lanes(self, stage: TrainStage, *, processes: int = 1) -> int:
        """Number of spans of the sample order. `auto` depends on `processes` only above 256: a multiple if possible."""
        if self.data.lanes != "auto":
            return self.data.lanes
        return lanes_of(stage.global_batch_size, processes=processes, repeats=stage.augment.repeats)

    def image_sizes(self, name: StageName) -> tuple[int, ...]:
        """List the sides of a stage's training images, ascending: one, unless they grow."""
        size = self.train_stage(name).image_size
        growth = growth_of(size)
        return growth.sizes(size // self.model.grid_size(size)) if growth else (size,)

    def train_stage(self, name: StageName) -> TrainStage:
        """Get a training stage by name; KeyError if the recipe lacks it, or for swap_head."""
        stage = getattr(self.stages, name)
        if not isinstance(stage, TrainStage):
            raise KeyError(name)
        return stage


def lanes_of(batch: int, *, processes: int, repeats: int = 1) -> int:
    """Choose `data.lanes` for a global batch under `auto`.

    With repeats of an image in a batch, a lane gives at least four different ones, if possible with all their repeats.
    """
    most = FEW_PROCESSES if processes <= FEW_PROCESSES else _MANY_LANES
    if repeats > 1:
        most = min(most, max(1, batch // (4 * repeats)))
    lanes = max((n for n in range(1, most + 1) if batch % n == 0), key=lambda n: (batch % (n * repeats) == 0, n))
    if processes > FEW_PROCESSES and lanes % processes:
        return max((n for n in range(processes, MOST_LANES + 1, processes) if batch % n == 0), default=lanes)
    return lanes
