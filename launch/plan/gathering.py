"""Turn recipe, shards and flags into a `RecipeForecast`. Writes nothing; needs torch only to check frozen weights."""

from pathlib import Path

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import is_local, redacted
from shardvit.launch.local.env import num_gpus
from shardvit.launch.plan.plan_options import PlanOptions
from shardvit.launch.plan.plan_page import RecipeForecast
from shardvit.launch.plan.shards import look
from shardvit.pipeline.budget.communication import links_of
from shardvit.pipeline.budget.cost import stage_cost
from shardvit.pipeline.budget.forecast import GivenSpeed, Hardware, Shards, StageForecast, TeacherCost, forecast_stage
from shardvit.pipeline.budget.gpus import Gpu, find_gpu, gpu_of_driver
from shardvit.pipeline.budget.length import stage_length
from shardvit.pipeline.budget.warnings import engine_warnings, stage_warnings
from shardvit.pipeline.recipe.duration import parse_duration
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.pretraining import SelfSupervisedStage
from shardvit.pipeline.recipe.vocabulary import WEIGHT_BYTES, StageName

DRIVER = Path("/proc/driver/nvidia/gpus")  # GPU/information for each GPU
_ASSUMED_CLASSES = 1000
_MOST_IMAGES = 10**12


def make_plan(recipe: Recipe, options: PlanOptions, *, driver: Path = DRIVER) -> RecipeForecast:
    """Forecast all stages. UserError if an option is out of range or contradicts another."""
    options.check()
    names = recipe.stages.trained
    num_images = _by_stage(options.images, flag="images", names=names)
    num_classes = _by_stage(options.classes, flag="classes", names=names)
    kind = find_gpu(options.gpu) if options.gpu else _gpu_here(driver)
    if kind is None and (options.mfu, options.node_gbps) != (None, None):
        raise UserError("--mfu, --node-gbps: they have no effect without a GPU's peak and links; give --gpu too")
    count = options.gpus or (recipe.processes if recipe.processes != "auto" else max(1, num_gpus()))
    links = links_of(kind, gpus_per_node=options.gpus_per_node, node_gbps=options.node_gbps) if kind else None
    machine, measured = Hardware(gpus=count, gpu=kind, links=links), options.images_per_second
    warnings = [] if kind else [_no_gpu(here=num_gpus(), timed=measured is not None, gpus=count)]
    forecasts: list[StageForecast] = []
    notes: list[str] = []
    given = GivenSpeed(mfu=options.mfu)
    for name in names:
        config = recipe.train_stage(name)
        if config.optimizer.frozen_needs_model:
            from shardvit.pipeline.training.stages import check_frozen  # imports torch

            check_frozen(recipe, stage=name)
        shards, missing = _shards(recipe, name, num_images=num_images.get(name), num_classes=num_classes.get(name))
        teacher, unseen = _teacher(recipe, name)
        notes += [*missing, *unseen]
        if measured is not None and given.measured_flops is None:
            cost = stage_cost(recipe.model, stage=config, engine=recipe.engine, num_classes=shards.num_classes)
            with_teacher = cost.training_flops + (teacher.forward_flops if teacher else 0)
            given = GivenSpeed(None, measured, with_teacher, name)
        length = stage_length(recipe, stage=name, num_images=shards.num_images, processes=count)
        forecasts.append(
            forecast_stage(
                recipe, stage=name, length=length, shards=shards, machine=machine, given=given, teacher=teacher
            )
        )
    for forecast in forecasts:
        warnings += stage_warnings(forecast, recipe=recipe, machine=machine)
    warnings += [*engine_warnings(recipe, machine=machine), *notes]
    per_node = min(options.gpus_per_node, count)
    return RecipeForecast(recipe, machine, per_node, tuple(dict.fromkeys(warnings)), tuple(forecasts))


def _teacher(recipe: Recipe, stage: StageName) -> tuple[TeacherCost | None, list[str]]:
    """Count the teacher of a stage, if it has one and it is here."""
    distill = recipe.train_stage(stage).distillation
    if distill is None:
        return None, []
    if not Path(distill.teacher).exists():
        why = f"{redacted(distill.teacher)} is not here, so its memory and forward passes are not counted"
        return None, [f"stages.{stage}.distill.teacher: {why}"]
    from shardvit.pipeline.using.teacher import check_teacher  # imports torch

    facts = check_teacher(recipe, stage=stage, classes=None)
    exact = "fp32" in (recipe.engine.precision, distill.precision)
    return TeacherCost(WEIGHT_BYTES["fp32" if exact else "bf16"] * facts.parameters, facts.forward_flops), []


def _by_stage(text: str | None, *, flag: str, names: tuple[StageName, ...]) -> dict[str, int]:
    """Parse 1281167, or pretrain=14197122,finetune=1281167."""
    if text is None:
        return {}
    found: dict[str, int] = {}
    parts = text.split(",") if "=" in text else [f"{name}={text}" for name in names]
    for part in parts:
        name, _, number = part.strip().partition("=")
        if name not in names:
            raise UserError(f"--{flag}: {name} is no training stage of the recipe; it has {', '.join(names)}")
        try:
            found[name] = int(float(number.replace("_", "")))
        except (ValueError, OverflowError):
            raise UserError(f"--{flag}: {number!r} is no number; write {flag}=N or STAGE=N,STAGE=N") from None
        if not 1 <= found[name] <= _MOST_IMAGES:
            raise UserError(f"--{flag}: it is {number}; give 1 to {_MOST_IMAGES:.0e}")
    return found


def _shards(
    recipe: Recipe, stage: StageName, *, num_images: int | None, num_classes: int | None
) -> tuple[Shards, list[str]]:
    """Determine a stage's training set, with a sentence for each assumption."""
    config, problem = recipe.train_stage(stage), ""
    takes_classes = not isinstance(config, SelfSupervisedStage)
    remote = not all(is_local(each.shards) for each in config.train or ())
    if not (remote and num_images and num_classes):  # otherwise nothing needs downloading
        try:
            there = look(recipe, stage=stage, at="training")
        except (UserError, OSError) as error:
            problem = f" ({error})"
        else:
            images, classes = num_images or there.num_images, num_classes or there.num_classes
            if train := there.train:
                stored = sum(shard.stored_samples for shard in train.shards)
                mean_bytes = None if train.num_bytes is None else train.num_bytes / max(1, stored)
                return Shards(images, classes or _ASSUMED_CLASSES, mean_bytes, len(train.shards)), []
            if there.role and not config.train:
                labels = (
                    f" of {classes:,} classes"
                    if classes
                    else f" (assuming {_ASSUMED_CLASSES:,} classes: give --classes N)"
                )
                note = f"{stage}: planned without its shards, for {config.data}: {images:,} images"
                return Shards(images, classes or _ASSUMED_CLASSES), [note + (labels if takes_classes else "")]
            problem = f" ({'; '.join(there.unopened)})"
    missing: list[str] = []
    if num_images is None and parse_duration(config.duration).unit == "epochs":
        missing.append(f"how many steps {config.duration} are cannot be counted: give --images N")
    if num_classes is None and takes_classes:
        missing.append(f"{_ASSUMED_CLASSES:,} classes are assumed: give --classes N")
    notes = [f"{stage}: planned without its shards; {'; '.join(missing)}{problem}"] if missing else []
    return Shards(num_images, num_classes or _ASSUMED_CLASSES), notes


def _gpu_here(driver: Path) -> Gpu | None:
    """Identify this machine's GPU from the driver's files; None if it is not in the table."""
    if not num_gpus():
        return None
    for information in sorted(driver.glob("*/information")):
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return gpu_of_driver(value.strip())
    return None


def _no_gpu(*, here: int, timed: bool, gpus: int) -> str:
    where = "this machine's GPU is not in the table" if here else "this machine has no GPU"
    left_out = "whether it fits" if timed else "whether it fits, and how long it takes,"
    traffic = " and what the processes wait for one another" if timed and gpus > 1 else ""
    return f"{where}, so {left_out}{traffic} is not counted: name one, such as --gpu h200"
