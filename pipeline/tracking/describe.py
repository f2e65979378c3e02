"""Name and describe the MLflow runs of a pipeline and its stages, and write the facts of an attempt.

A stage's params are its own keys without prefix plus the shared keys, so that stages share columns in MLflow.
A pipeline's are all keys. Keys without a value are left out.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from shardvit.data_shards.text import one_line
from shardvit.model.config import ModelConfig
from shardvit.model.counting.flops import account
from shardvit.pipeline.budget.cost import phase_costs
from shardvit.pipeline.recipe.io import flatten
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.image_growth import shown
from shardvit.pipeline.recipe.stages.pretraining import PretrainStage, SelfSupervisedStage
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import MLFLOW_FACTS_FILE, RECIPE_FILE, REPLACED_FOLDER, StageName
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.runs.written_by import source_tags
from shardvit.pipeline.tracking.facts import DatasetInput, FinalStatus, RunFacts, RunStatus, load_facts, now_ms

if TYPE_CHECKING:
    from shardvit.data_shards.shards.shard_set import ShardSet
    from shardvit.pipeline.recipe.stage_plan import StagePlan

_STAGES = "stages."
_ABSENT = "None"
_LONGEST_PART = 60  # of a run's name
_KINDS = {
    "masked_patch": "Masked patch prediction",
    "masked_autoencoder": "A masked autoencoder",
    "pretrain": "Pre-training",
    "finetune": "Fine-tuning",
}


def model_slug(config: ModelConfig) -> str:
    """Shorten a model: `vitb16` for B/16, `r50b16` for R50+B/16, `vit64x6p4` for width, depth and patch size."""
    if config.variant is not None:
        text = re.sub("[^a-z0-9]", "", config.variant.lower())
        return text if config.variant.startswith("R") else f"vit{text}"
    if config.custom is not None:
        return config.custom.rpartition(":")[2].lower()
    if config.kind == "resnet":
        layers = "".join(str(count) for count in config.resnet.layers)
        return f"resnet{layers}x{config.resnet.width_factor}"
    sizes = config.sizes
    stem = "r" if sizes.resnet_layers is not None else ""
    return f"{stem}vit{sizes.width}x{sizes.depth}p{sizes.patch_size}"


def stage_name(recipe: Recipe, stage: StageName, *, folder: RunFolder, datasets: Iterable[DatasetInput]) -> str:
    """Name a run: `pretrain-vitb16-224-imagenet21k-20251122`, with `-POINT` in a sweep, `-restart1` if restarted."""
    config = getattr(recipe.stages, stage)
    size = [str(config.image_size)] if isinstance(config, TrainStage) else []
    data = next((one.name.removesuffix("-train") for one in datasets if one.context == "train"), recipe.name)
    point = [recipe.name] if folder.sweep is not None else []
    again = [f"restart{count}"] if (count := restarts(folder, stage)) else []
    return "-".join([stage, model_slug(recipe.model), *size, _slug(data), time.strftime("%Y%m%d"), *point, *again])


def restarts(folder: RunFolder, stage: StageName) -> int:
    """Count how often `--restart` moved the stage aside."""
    return len([path for path in (folder.path / REPLACED_FOLDER).glob(f"{stage}-*") if path.is_dir()])


def pipeline_params(recipe: Recipe) -> dict[str, str]:
    """Flatten the recipe's keys that have a value."""
    return {key: value for key, value in flatten(recipe).items() if value != _ABSENT}


def stage_params(recipe: Recipe, stage: StageName) -> dict[str, str]:
    """Flatten this stage's keys and the shared ones."""
    own = f"{_STAGES}{stage}."
    params: dict[str, str] = {}
    for key, value in pipeline_params(recipe).items():
        if key.startswith(own):
            params[key.removeprefix(own)] = value
        elif not key.startswith(_STAGES):
            params.setdefault(key, value)
    return params


def stage_datasets(
    train: ShardSet, held_out: ShardSet, *, also_eval: Mapping[str, ShardSet] | None = None
) -> tuple[DatasetInput, ...]:
    """Name the sets SET-SPLIT, those of `also_eval` SET-SPLIT-KEY."""
    more = also_eval or {}
    sets = (train, held_out, *more.values())
    names = [one.name if one.split in ("", "all") else f"{one.name}-{one.split}" for one in sets]
    if names[0] == names[1]:
        names[1] += "-held-out"
    names[2:] = [f"{name}-{key}" for name, key in zip(names[2:], more, strict=True)]
    uses = ("train", "eval", *(f"eval {key}" for key in more))
    return tuple(
        DatasetInput(
            name=name,
            source=one.source,
            digest=one.digest,
            context=use,
            images=one.num_samples,
            classes=one.num_classes,
        )
        for one, name, use in zip(sets, names, uses, strict=True)
    )


def plan_params(recipe: Recipe, stage: StageName, *, plan: StagePlan, classes: int) -> dict[str, str]:
    """Return params for steps, batches and model cost (not without labels, where the head is another)."""
    config = recipe.train_stage(stage)
    images = plan.total_steps * plan.global_batch_images
    params = {
        "plan.steps": str(plan.total_steps),
        "plan.images": str(images),
        "plan.epochs": f"{images / plan.samples_per_epoch:.4g}",
        "plan.processes": str(plan.world_size),
        "plan.micro_batch_size": str(plan.micro_batch_size),
        "plan.accumulation_steps": str(plan.accumulation_steps),
        "plan.classes": str(classes),
    }
    if isinstance(config, SelfSupervisedStage):
        return params
    cost = account(
        recipe.model,
        image_size=config.image_size,
        num_classes=classes,
        head=config.head if isinstance(config, PretrainStage) else "linear",
        patch_dropout=config.patch_dropout,
    )
    training_flops = cost.training_flops * images
    if plan.size_phases:
        params["plan.image_sizes"] = plan.describe_sizes()
        costs = phase_costs(recipe, stage=stage, plan=plan, num_classes=classes)
        lengths = zip(costs.values(), pairwise([*costs, plan.total_steps]), strict=True)
        training_flops = plan.global_batch_images * sum(each.training_flops * (end - at) for each, (at, end) in lengths)
    return params | {
        "cost.parameters": str(cost.parameters),
        "cost.forward_flops_per_image": str(cost.forward_flops),
        "cost.training_flops_per_image": str(cost.training_flops),
        "cost.training_flops": str(training_flops),
        "cost.tokens_per_image": str(cost.tokens),
    }


def stage_description(recipe: Recipe, folder: RunFolder, *, stage: StageName, params: dict[str, str]) -> str:
    """Describe a stage's run in Markdown."""
    model = recipe.model.variant or model_slug(recipe.model)
    if stage == "swap_head":
        text = f"The pre-training head of {model} replaced by one of zeros for the new classes."
    else:
        config = recipe.train_stage(stage)
        train = "" if config.train is None else " + ".join(_code(each.shards) for each in config.train)
        text = f"{_KINDS[stage]} of **{model}** at {shown(config.image_size)} on {train}."
    if "plan.steps" in params:
        steps, images, epochs = (params[f"plan.{key}"] for key in ("steps", "images", "epochs"))
        text += f" {int(steps):,} steps, {int(images):,} images, {epochs} epochs."
    if "cost.parameters" in params:
        parameters, flops = int(params["cost.parameters"]), int(params["cost.forward_flops_per_image"])
        tokens = f", {params['cost.tokens_per_image']} tokens" if params["cost.tokens_per_image"] != "0" else ""
        text += f" {parameters:,} parameters, {flops / 1e9:.4g} GFLOPs an image forward{tokens}."
    return f"{text}\n\n{_commands(folder)}"


def pipeline_facts(recipe: Recipe, folder: RunFolder) -> RunFacts:
    """Collect the pipeline's facts so far; results are `finetune/val/top1`, those of the last stage also `val/top1`."""
    names = recipe.stages.names
    records = {name: folder.peek(name) for name in names}
    stages = {name: facts for name in names if (facts := load_facts(folder.stage(name))) is not None}
    tags, params = {"shardvit.kind": "pipeline"}, pipeline_params(recipe)
    results: dict[str, tuple[float, int]] = {}
    for name, facts in stages.items():
        tags |= {tag: text for tag, text in facts.tags.items() if tag.startswith(("mlflow.", "shardvit.git."))}
        params |= {f"{name}.{key}": text for key, text in facts.params.items() if key.startswith(("plan.", "cost."))}
        if records[name].state == "done" and facts.ended_ms:
            values = {metric: (value, facts.ended_ms) for metric, value in records[name].results.items()}
            results |= {f"{name}/{metric}": value for metric, value in values.items()}
            results |= values if name == names[-1] else {}
    unfinished: list[RunStatus] = [facts.status for facts in stages.values() if facts.status != "FINISHED"]
    done: RunStatus = "FINISHED" if all(record.state == "done" for record in records.values()) else "RUNNING"
    model = recipe.model.variant or model_slug(recipe.model)
    text = f"**{model}**: {' → '.join(names)}. Results of the stages are metrics of this run; their curves are in its "
    return RunFacts(
        name=recipe.name,
        description=f"{text}child runs.\n\n{_commands(folder)}",
        tags=tags,
        params=params,
        datasets=tuple(dict.fromkeys(one for facts in stages.values() for one in facts.datasets)),
        results=results,
        status=unfinished[0] if unfinished else done,
        begun_ms=min((each.begun_ms for each in stages.values() if each.begun_ms), default=None),
        ended_ms=max((each.ended_ms for each in stages.values() if each.ended_ms), default=None),
    )


def _commands(folder: RunFolder) -> str:
    run, root = str(folder.path), str(folder.runs_root)
    lines = (
        f"- command: {_code(shlex.join(['shardvit', 'run', f'{run}/{RECIPE_FILE}', '--runs', root]))}",
        f"- recipe: `{RECIPE_FILE}` among the artifacts",
        f"- report: {_code(shlex.join(['shardvit', 'report', run]))}",
        f"- model: {_code(shlex.join(['shardvit', 'predict', run, 'IMAGE...']))}",
    )
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`{one_line(text).replace('`', chr(39))}`"


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_PART] or "data"


def begin_attempt(
    folder: RunFolder,
    recipe: Recipe,
    stage: StageName,
    *,
    from_step: int = 0,
    kept_rows: int = 0,
    params: Mapping[str, str],
    datasets: Sequence[DatasetInput] = (),
    tags: Mapping[str, str],
) -> RunFacts:
    """Write the facts of a stage's new attempt; `tags` has its job, host and processes. Raises OSError."""
    before = load_facts(folder.stage(stage))
    kept = (*(before.kept_rows if before else ()), kept_rows)
    short = {"shardvit.world_size": "processes", "shardvit.host": "host", "shardvit.slurm_job_id": "job"}
    summary = [f"step {from_step}", *(f"{name}={tags[tag]}" for tag, name in short.items() if tag in tags)]
    again = {"shardvit.restart": str(count)} if (count := restarts(folder, stage)) else {}
    facts = RunFacts(
        name=before.name if before else stage_name(recipe, stage, folder=folder, datasets=datasets),
        tags={
            **(before.tags if before else {}),
            **source_tags(),
            **tags,
            **again,
            "shardvit.stage": stage,
            "shardvit.attempt": str(len(kept)),
            f"shardvit.attempt.{len(kept)}": " ".join(summary),
        },
        params={**stage_params(recipe, stage), **params},
        datasets=tuple(datasets),
        kept_rows=kept,
        begun_ms=before.begun_ms if before else now_ms(),
    )
    facts.save(folder.stage(stage) / MLFLOW_FACTS_FILE)
    return facts


def end_attempt(folder: RunFolder, stage: StageName, status: FinalStatus) -> None:
    """Record how an attempt ended. Raises OSError."""
    if facts := load_facts(folder.stage(stage)):
        ended = replace(facts, status=status, ended_ms=now_ms())
        ended.save(folder.stage(stage) / MLFLOW_FACTS_FILE)


def try_writing(write: Callable[[], object], *, say: Callable[[str], None]) -> None:
    """Write facts; a failure is printed and never stops training."""
    try:
        write()
    except FileNotFoundError:  # the run folder is gone, which is reported elsewhere
        return
    except Exception as error:  # noqa: BLE001
        say(f"MLflow: the facts of this attempt cannot be written: {type(error).__name__}: {error}")
