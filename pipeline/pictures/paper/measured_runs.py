"""Read the numbers for the paper's figures over data-set size and cost from runs.

    few-shot accuracy     val/fewshot_SET_5shot of a pre-training stage's curve, and RUN/transfer/*.json
    size                  images seen by then, and images in the training set (data.json)
    cost                  pre-training FLOPs, forward and backward: images seen times `model.counting`'s
    transfer accuracy     top-1 after fine-tuning, and RUN/transfer/*.json

Skips missing or damaged records. No torch.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import read_inside
from shardvit.data_shards.text import parse_json
from shardvit.model.config import ModelConfig
from shardvit.model.counting.flops import account, account_autoencoder
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.pipeline.budget.cost import phase_costs
from shardvit.pipeline.pictures.style import plain
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.recipe.stages.image_growth import growth_of
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage
from shardvit.pipeline.recipe.vocabulary import DATA_FILE, StageName
from shardvit.pipeline.runs.read import Run, RunStage
from shardvit.pipeline.transfer.results import TransferRecord, score_name, transfer_records

PRETRAINING: tuple[StageName, ...] = ("masked_patch", "masked_autoencoder", "pretrain")
Family = Literal["ViT", "hybrid", "ResNet"]
_EXA = 1e18
_FEW_SHOT = re.compile(r"val/fewshot_(.+)_(\d{1,6})shot")


@dataclass(frozen=True)
class FewShotPoint:
    """Few-shot accuracy of a run's pre-trained model at one moment."""

    run: str
    model: str
    data_set: str
    shots: int
    images_seen: int
    training_images: int | None  # in its pre-training set
    top1: float

    @property
    def measure(self) -> str:
        return f"{self.data_set}, {self.shots}-shot"


@dataclass(frozen=True)
class CostPoint:
    """Pre-training cost of a run, and one accuracy reached after it."""

    run: str
    model: str
    family: Family
    images_seen: int
    exaflops: float | None  # 0: no pre-training; None: pre-trained elsewhere
    hours: float | None  # GPU-hours, or process-hours on CPUs, from the curve
    measure: str  # target set and method
    top1: float


def few_shot_points(run: Run, *, name: str) -> Iterator[FewShotPoint]:
    """Yield a run's points by images seen; a moment measured twice gives one point."""
    stage = run.stage("masked_autoencoder") or run.stage("pretrain")  # the stages with few-shot sets
    found: dict[tuple[int, str, int], float] = {}  # by images seen, data set, shots
    for row in () if stage is None else stage.rows:
        for metric, value in row.metrics.items():
            if (match := _FEW_SHOT.fullmatch(metric)) and math.isfinite(value):
                found[row.images_seen, match[1], int(match[2])] = value
    for record in _records(run, stages=("pretrain",) if stage is None else (stage.name,)):
        for score in record.results:
            shots = re.fullmatch(r"\d{1,6}", str(score.settings.get("shots")))
            is_top1 = score.method == "fewshot" and score.metric == "top1" and _is_share(score.value)
            if shots and is_top1 and record.images_seen:
                found[record.images_seen, score.data_set, int(shots[0])] = score.value
    images, model = _training_images(stage), model_name(run)
    for (seen, data_set, shots), value in sorted(found.items()):
        yield FewShotPoint(plain(name), model, plain(data_set), shots, seen, images, value)


def cost_points(run: Run, *, name: str) -> Iterator[CostPoint]:
    """Yield a run's points: fine-tuning first, then measurements of the pre-trained model."""
    if run.recipe is None:
        return
    begun = [stage for each in PRETRAINING if (stage := run.stage(each)) and stage.record.images_seen]
    seen = sum(stage.record.images_seen for stage in begun)
    costs = [_exaflops(run, stage) for stage in begun]
    exaflops = None if None in costs else sum(cost for cost in costs if cost is not None)
    swap = run.recipe.stages.swap_head
    if not begun and swap is not None and getattr(swap, "model", None):
        exaflops = None  # pre-trained elsewhere
    hours = [each.latest.get("perf/gpu_hours") or each.latest.get("perf/process_hours") or 0.0 for each in begun]
    family = _family(run.recipe.model)
    point = partial(CostPoint, plain(name), model_name(run), family, seen, exaflops, sum(hours) or None)
    finetune = run.stage("finetune")
    if finetune is not None and run.recipe.stages.finetune is not None:
        top1 = finetune.record.results.get(run.recipe.train_stage("finetune").judged_by("top1"))
        if top1 is not None and _is_share(top1):
            yield point(f"fine-tuned, {held_out_name(run, stage='finetune')}", top1)
    for record in _records(run, stages=PRETRAINING):
        if record.images_seen not in (None, seen) and record.step is not None:
            continue  # measured on an intermediate checkpoint
        if record.mean is not None and _is_share(record.mean):
            yield point(f"mean of {plain(record.name)}", record.mean)
        for score in record.results:
            if score.metric == "top1" and _is_share(score.value):
                measure = score_name(score)
                measure = f"{record.name}: {measure}" if record.command == "transfer" else measure.replace("_", " ")
                yield point(plain(measure), score.value)


def model_name(run: Run) -> str:
    """Name the model by its variant or sizes."""
    if run.recipe is None:
        return "?"
    config = run.recipe.model
    if config.variant is not None:
        return config.variant
    if config.custom is not None:
        return config.custom.rpartition(":")[2]
    if config.kind == "resnet":
        return f"ResNet {'-'.join(map(str, config.resnet.layers))}x{config.resnet.width_factor}"
    sizes = config.sizes
    return f"{'ViT' if sizes.resnet_layers is None else 'hybrid'} {sizes.depth}x{sizes.width}/{sizes.patch_size}"


def _family(config: ModelConfig) -> Family:
    if config.kind == "resnet":
        return "ResNet"
    return "ViT" if config.sizes.resnet_layers is None else "hybrid"


def _records(run: Run, *, stages: tuple[StageName, ...]) -> list[TransferRecord]:
    return [each for each in transfer_records(run.folder.path) if each.stage in stages]


def _is_share(value: float) -> bool:
    return math.isfinite(value) and 0 <= value <= 1


def _training_images(stage: RunStage | None) -> int | None:
    """Size of the training set when the stage began."""
    if stage is None:
        return None
    try:
        record = parse_json(read_inside(stage.folder / DATA_FILE, folder=stage.folder))
        return sum(map(int, record["sets"]["training images"]["num_samples"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _exaflops(run: Run, stage: RunStage) -> float | None:
    """Training cost of a stage so far; None if stage.json does not describe its model."""
    try:
        meta = SavedModelMeta.model_validate(stage.record.model)
        config = None if run.recipe is None else run.recipe.train_stage(stage.name)
        if run.recipe is not None and config is not None and growth_of(config.image_size):
            return _exaflops_of_phases(run.recipe, stage, num_classes=meta.num_classes)
        if isinstance(config, MaskedAutoencoderStage):
            cost = account_autoencoder(
                meta.model, image_size=meta.image_size, decoder=config.decoder, mask_ratio=config.mask_ratio
            )
        else:
            cost = account(
                meta.model,
                image_size=meta.image_size,
                num_classes=meta.num_classes,
                head=meta.class_head,
                patch_dropout=0.0 if config is None else config.patch_dropout,
            )
    except (UserError, ValueError, AssertionError, AttributeError):
        return None
    return stage.record.images_seen * cost.training_flops / _EXA


def _exaflops_of_phases(recipe: Recipe, stage: RunStage, *, num_classes: int) -> float | None:
    """Count those of a stage whose images grow, phase by phase."""
    if (images := _training_images(stage)) is None:
        return None
    plan = plan_stage(recipe, stage=stage.name, samples_per_epoch=images, world_size=1)
    costs = phase_costs(recipe, stage=stage.name, plan=plan, num_classes=num_classes)
    bounds, left, total = [*costs, plan.total_steps], stage.record.images_seen, 0
    for (first, cost), end in zip(costs.items(), bounds[1:], strict=True):
        seen = min(left, (end - first) * plan.global_batch_images)
        total, left = total + seen * cost.training_flops, left - seen
    return total / _EXA


def held_out_name(run: Run, *, stage: StageName) -> str:
    """Name a stage's held-out set by the last two folders of its location."""
    config = getattr(run.recipe.stages, stage) if run.recipe else None
    named = getattr(config, "eval", None)
    if named is None:
        return "held-out images"
    return plain("/".join(named.shards.rstrip("/").split("/")[-2:]))
