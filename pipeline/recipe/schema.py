"""The recipe's keys: one typed description of everything a run depends on. Imports no torch.

Unknown keys are errors. Numbers that can be derived are not stored: micro-batch and accumulation follow from the
global batch and the world size (`stage_plan`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from model.config import ModelConfig, Regularisation
from pipeline.recipe.data import MOST_LANES, DataConfig
from pipeline.recipe.duration import Strict
from pipeline.recipe.stage import MOST_SECONDS, MaskedPatchStage, Stages, TrainStage
from pipeline.recipe.vocabulary import OPTIMIZERS, AttentionKernel, OptimizerName, StageName

FEW_PROCESSES = 256  # up to here `data.lanes: auto` does not depend on their number
_MANY_LANES = 4096  # for more processes
_MOST_IMAGES = 2**20  # of a batch
_FP16_SKIPS = 17  # in a row, from the first scale of 2^16 down to 1
_MOST_PATCHES = 2**20  # of an image
_LONGEST_NAME = 200  # file systems take 255 bytes, MLflow's server 250
_LONGEST_MLFLOW_NAME = 250  # of a registered model and an alias
_MLFLOW_VERSION = re.compile("v[0-9]+", re.IGNORECASE)  # MLflow's own names of versions
_TAKEN_NAMES = ("mlartifacts", "mlflow.db")  # beside the runs, in the folder of them all


class TrackingConfig(Strict):
    """Tracking with MLflow; does not affect training."""

    mode: Literal["online", "offline"] = "online"
    """online: send during training; offline: send nothing until `shardvit sync`."""
    system_metrics: bool = False
    """Log CPU, memory, network, disk and GPU of each node every ten seconds, in a separate process."""
    log_model: bool = True
    """Log the last stage's model to MLflow, loadable without shardvit; false: keep it only in the run folder."""
    register_as: str | None = Field(default=None, min_length=1, max_length=_LONGEST_MLFLOW_NAME)
    """Register the model as the next version of this registered model."""
    alias: str | None = Field(default=None, min_length=1, max_length=_LONGEST_MLFLOW_NAME)
    """Alias to move to that version, such as champion."""

    @field_validator("register_as")
    @classmethod
    def _name_of_a_model(cls, name: str | None) -> str | None:
        if name is not None and re.search("[/:]", name):
            raise ValueError(f"register_as {name!r}: MLflow takes no '/' and no ':' in a model's name")
        return name

    @field_validator("alias")
    @classmethod
    def _name_of_an_alias(cls, alias: str | None) -> str | None:
        if alias is None:
            return None
        if not re.fullmatch(r"[A-Za-z0-9_-]+", alias):
            raise ValueError(f"alias {alias!r}: give letters (a to z), digits, '_' and '-'")
        if _MLFLOW_VERSION.fullmatch(alias) or alias == "latest":
            raise ValueError(f"alias {alias!r} is what MLflow calls a version itself: give another")
        return alias

    @model_validator(mode="after")
    def _nothing_ignored(self) -> TrackingConfig:
        if self.mode == "offline":
            self.refuse("system_metrics", means_nothing="offline, as they are not kept to be sent later")
        if not self.log_model:
            self.refuse("register_as", means_nothing="where no model is logged")
        if self.register_as is None:
            self.refuse("alias", means_nothing="without register_as")
        return self


class EngineConfig(Strict):
    """Engine, precision and kernels: they affect speed and memory, not what is learned."""

    backend: Literal["deepspeed", "accelerate"] = "deepspeed"
    """deepspeed for everything; accelerate (plain DDP) for debugging and as a baseline."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """0: no sharding (torch's DDP). DeepSpeed: 1 shards the optimizer state, 2 also gradients, 3 also weights."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """bf16 and fp16 keep float32 master weights; fp16 needs a GPU."""
    fp32_matmul: Literal["ieee", "tf32"] = "ieee"
    """float32 matrix products and convolutions on a GPU: ieee, or tf32 (10-bit mantissa). CPUs always use ieee."""
    compile: Literal["auto", "off", "blocks"] = "auto"
    """blocks: torch.compile each Transformer block; auto: blocks on GPUs with ZeRO 0 to 2, else off."""
    attention: AttentionKernel | Literal["auto"] = "auto"
    """Attention kernel; auto: the fastest known for this GPU, precision and shape."""
    deterministic: Literal["on", "off"] = "on"
    """on: a step is bit-identical on the same kind of GPU, so resuming is exact; off: the fastest kernels, which differ
    only above 256 tokens. Always on for CPUs."""
    max_micro_batch_size: int = Field(default=256, ge=1, le=_MOST_IMAGES)
    """Most images per process in a forward pass; larger batches use gradient accumulation."""
    activation_checkpointing: bool | Annotated[int, Field(ge=2, le=1000)] = False
    """true: recompute all blocks in the backward pass (less memory, a third more compute); k: every k-th block."""
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = "none"
    """Keep in host memory: optimizer (master weights and moments, updated on the CPU; ZeRO 1 to 3), and parameters,
    copied to the GPU on use (ZeRO 3). Much slower: only for models that do not fit otherwise."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Average gradients during the backward pass; auto: with several processes. DeepSpeed then waits for the GPU once
    per step."""
    bucket_elements: int = Field(default=25_000_000, ge=2, multiple_of=2, le=2**31)
    """Gradient elements averaged per message. Larger: fewer messages, less overlap, more memory."""
    max_skipped_steps: int = Field(default=20, ge=1, le=10**9)
    """Stop training after this many skipped steps (gradient not finite) in a row."""
    collective_timeout_seconds: float = Field(default=1800, gt=0, le=MOST_SECONDS)
    """A process that waits longer than this for the others assumes that one of them is dead."""
    hang_seconds: float = Field(default=900, ge=0, le=MOST_SECONDS)
    """Name a process without progress for this long, and end the run so that it can be restarted; 0: never."""
    slow_rank_factor: float = Field(default=2.0, gt=1)
    """Call a process slow while its own part of a step takes this many times as long as the others'."""
    slow_rank_seconds: float = Field(default=2.0, gt=0, le=MOST_SECONDS)
    """Report a slow process once the others have waited this long for it; slow_rank stop acts after ten times that."""
    slow_rank: Literal["report", "stop"] = "report"
    """report: name the slow process and continue; stop: save and end, so that the run can be restarted elsewhere."""
    saving: Literal["background", "blocking"] = "background"
    """background: copy checkpoints to host memory and write them while training continues; blocking: wait."""

    @model_validator(mode="before")
    @classmethod
    def _without_fp8(cls, tree: Any) -> Any:
        """Accept `experimental: {fp8: off}`, which earlier versions wrote into run folders."""
        if isinstance(tree, dict) and tree.get("experimental") in ({}, {"fp8": "off"}):
            return {key: value for key, value in tree.items() if key != "experimental"}
        return tree

    @model_validator(mode="after")
    def _nothing_ignored(self) -> EngineConfig:
        if self.backend == "accelerate" and self.zero_stage > 1:
            self.refuse("zero_stage", means_nothing="to accelerate, which shards nothing")
        if self.precision != "fp32":
            self.refuse("fp32_matmul", means_nothing=f"to precision {self.precision}, which has no float32 products")
        if self.compile == "blocks" and self.zero_stage == 3:
            raise ValueError(
                "compile blocks is for ZeRO 0 to 2: ZeRO 3 gathers weights inside the blocks, which would be cut into "
                "pieces; take another zero_stage, or leave compile out"
            )
        if self.offload != "none":
            self._check_offload()
        if self.backend == "accelerate":
            self.refuse("overlap", "bucket_elements", means_nothing="to accelerate, which leaves both to torch")
        elif self.zero_stage == 0:
            self.refuse("overlap", means_nothing="under ZeRO 0, which always overlaps")
        return self

    def _check_offload(self) -> None:
        if self.backend == "accelerate":
            self.refuse("offload", means_nothing="to accelerate, which keeps everything on the GPU")
        if self.zero_stage == 0:
            raise ValueError(
                f"offload {self.offload} with zero_stage 0, which keeps all on the GPU: set zero_stage to 1, 2 or 3"
            )
        if self.offload == "optimizer_and_parameters" and self.zero_stage < 3:
            raise ValueError(
                f"offload optimizer_and_parameters with zero_stage {self.zero_stage}: only ZeRO 3 can fetch parameters "
                "when they are used; set zero_stage to 3, or offload to optimizer"
            )

    def check_model(self, model: ModelConfig) -> None:
        """ValueError if the chosen kernels do not apply to `model` or cannot compute it."""
        if model.kind == "resnet":
            self.refuse("attention", means_nothing="to a pure ResNet", group="engine.")
            if self.compile == "blocks":
                raise ValueError("engine.compile blocks: a pure ResNet has no Transformer blocks: leave it out")
            return
        if model.position == "relative" and self.attention in ("cudnn", "flash"):
            raise ValueError(
                f"engine.attention {self.attention} learns no bias, as model.position relative needs: take auto, "
                "efficient or math"
            )

    def check_masks(self, stage: TrainStage, *, key: str) -> None:
        """ValueError if compile blocks cannot work with the dropout masks of the stage under `key`."""
        if self.compile == "blocks" and stage.draws_in_blocks:
            raise ValueError(
                f"{key}.dropout_masks process draws from the process's generator, where compiled blocks would draw "
                "other numbers: take sample, or set engine.compile: off"
            )

    @property
    def checkpointed_every(self) -> int:
        """Recompute every n-th block; 0: none."""
        return int(self.activation_checkpointing)

    def check_takes(self, optimizer: OptimizerName, *, key: str) -> None:
        """ValueError if the optimizer of the stage under `key` needs whole parameters, but ZeRO shards them."""
        sharded = self.backend == "deepspeed" and self.zero_stage > 0
        if sharded and OPTIMIZERS[optimizer].takes == "parameters":
            raise ValueError(
                f"{key}.optimizer.name: {optimizer} takes whole parameters, and ZeRO {self.zero_stage} cuts them into "
                "pieces: set engine.zero_stage to 0, or take adamw"
            )


class Recipe(Strict):
    """A whole pipeline."""

    name: str
    """Name of the run folder and of the MLflow run."""
    experiment: str = Field(default="shardvit", min_length=1)
    """MLflow experiment; the environment variable MLFLOW_EXPERIMENT_NAME takes precedence."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    processes: Annotated[int, Field(ge=1, le=10**6)] | Literal["auto"] = "auto"
    """Processes that `shardvit run` starts on this machine; auto: one per GPU, or one."""
    pictures: Literal["auto", "off"] = "auto"
    """auto: a low-priority process beside rank 0 draws data, evaluations and the model during training; off: only
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
            raise ValueError(f"name is {name!r}, which shardvit keeps for a file beside the runs: give another")
        return name

    @model_validator(mode="after")
    def _model_fits_stages(self) -> Recipe:
        stages = {
            name: stage for name in self.stages.names if isinstance(stage := getattr(self.stages, name), TrainStage)
        }
        self.engine.check_model(self.model)
        if (every := self.engine.checkpointed_every) > (most := self.model.num_blocks):
            raise ValueError(
                f"engine.activation_checkpointing {every}: the model has {most} blocks, so only the first would be "
                f"recomputed: give 2 to {most}, or true for all"
            )
        for name, stage in stages.items():
            key, size = f"stages.{name}", stage.image_size
            self.engine.check_takes(stage.optimizer.name, key=key)
            self.engine.check_masks(stage, key=key)
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
            if stage.rollback and stage.rollback.after_skipped_steps > self.engine.max_skipped_steps:
                raise ValueError(
                    f"{key}.rollback.after_skipped_steps {stage.rollback.after_skipped_steps} comes after "
                    f"engine.max_skipped_steps {self.engine.max_skipped_steps}, where training stops: make it smaller"
                )
            if stage.rollback and self.engine.precision == "fp16" and stage.rollback.after_skipped_steps < _FP16_SKIPS:
                raise ValueError(
                    f"{key}.rollback.after_skipped_steps {stage.rollback.after_skipped_steps}: with engine.precision "
                    f"fp16 the search for the loss scale skips steps, too: give at least {_FP16_SKIPS}"
                )
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
        if self.tracking.register_as is not None and isinstance(stages[list(stages)[-1]], MaskedPatchStage):
            raise ValueError(
                "tracking.register_as: the last stage's model fills in masked patches and knows no classes: add "
                "stages.finetune, or leave register_as out"
            )
        if self.model.position == "relative" and self.stages.swap_head and len(sizes) > 1:
            raise ValueError(
                "model.position relative is not defined at another resolution than it was trained at, and the stages' "
                f"image_size are {sorted(sizes)}: give them one, or take another position"
            )
        return self

    def lanes(self, stage: TrainStage, *, processes: int = 1) -> int:
        """Number of streams that the sample order is cut into. `auto` does not depend on the number of processes up to
        256; above that it is a multiple of it where possible."""
        if self.data.lanes != "auto":
            return self.data.lanes
        batch = stage.global_batch_size
        if processes <= FEW_PROCESSES:
            return max(n for n in range(1, FEW_PROCESSES + 1) if batch % n == 0)
        lanes = max(n for n in range(1, _MANY_LANES + 1) if batch % n == 0)
        if lanes % processes:
            return max((n for n in range(processes, MOST_LANES + 1, processes) if batch % n == 0), default=lanes)
        return lanes

    def train_stage(self, name: StageName) -> TrainStage:
        """Get a training stage by name; KeyError: the recipe lacks it, or it is swap_head."""
        stage = getattr(self.stages, name)
        if not isinstance(stage, TrainStage):
            raise KeyError(name)
        return stage
