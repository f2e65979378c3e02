"""`shardvit eval`: the command line; the arithmetic is in `pipeline.evaluation`."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line, table
from shardvit.data_shards.vocabulary import USUAL_MOST_PIXELS, EvalProtocol
from shardvit.launch.evaluation.rank import read_result, write_request
from shardvit.launch.flags import (
    Device,
    Force,
    JsonFile,
    MaxImagePixels,
    TarClasses,
    TarLabel,
    TarsAreMultiLabel,
    Trust,
    WhichWeights,
    demand_counts,
    demand_target,
    pixel_limit,
    tell_result,
)
from shardvit.launch.local.env import experiment_name, num_gpus, tracking_uri
from shardvit.launch.local.output import say, say_model
from shardvit.pipeline.evaluation.truth import Among, EvalRequest, LabelSet, Matching, open_set, what_is_asked
from shardvit.pipeline.recipe.vocabulary import EXIT_USER_ERROR, METRICS, EvalMetric

if TYPE_CHECKING:
    from shardvit.pipeline.evaluation.evaluate_file import ModelEvaluated

_METRICS: tuple[EvalMetric, ...] = get_args(EvalMetric)
_MOST_WORKERS = 8  # reading threads per process
_NAMED_FAULTS = 5
_SHOWN_CLASSES = 20  # of a longer table only the worst
_SHOWN_PAIRS = 20
WORDS = {  # rows of the printed result, in this order
    "val/top1": "top-1",
    "val/balanced_accuracy": "balanced accuracy",
    "val/commonest_class_share": "commonest class's share",
    "val/top5": "top-5",
    "val/loss": "loss",
    "val/calibration_error": "calibration error, 15 bins",
    "val/precision_at_1": "precision@1",
    "val/mean_average_precision": "mean average precision",
}


@Parameter(name="*")
@dataclass(frozen=True)
class EvalOptions:
    """Flags; those that `EvalRequest` also has are passed on."""

    protocol: Annotated[EvalProtocol | None, Parameter(help="Preprocessing; default: as the model's record says.")] = (
        None
    )
    crop_share: Annotated[
        float | None, Parameter(help="Crop's side over the resized short side; default: as recorded.")
    ] = None
    metrics: Annotated[
        tuple[str, ...] | None,
        Parameter(
            negative="",
            consume_multiple=True,
            help=f"Beyond loss and top-1: {', '.join(_METRICS)}, FILE:NAME; default: fitting.",
        ),
    ] = None
    labels: Annotated[
        LabelSet,
        Parameter(help="real: ImageNet's ReaL labels, by file name; imagenet_v2: folders 0 to 999."),
    ] = "shards"
    classes: Annotated[Matching, Parameter(help="Match classes by name, or trust their order (index).")] = "names"
    among: Annotated[Among, Parameter(help="Predict among the model's classes or only the shards'.")] = "model"
    weights: WhichWeights = None
    processes: Annotated[int, Parameter(help="Processes on this machine, one per GPU, or on CPUs.")] = 1
    batch_size: Annotated[int, Parameter(name=["--batch-size", "--batch"], help="Images of a forward pass.")] = 64
    label: TarLabel = None
    class_names: TarClasses = None
    multi_label: TarsAreMultiLabel = False
    json_file: JsonFile = None
    output: Annotated[Path | None, Parameter(help="Folder for evaluation.json and arrays.npz.")] = None
    tracking: Annotated[bool, Parameter(negative="--no-tracking", help="Make an MLflow run of the result.")] = True
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS
    device: Device = "auto"
    trust: Trust = None
    force: Force = False

    def check(self) -> None:
        """UserError: a bad value or MLflow address, an output that must not be replaced, or too few GPUs."""
        demand_counts(processes=self.processes, batch_size=self.batch_size)
        for each in self.metrics or ():
            if ":" not in each and each not in _METRICS:
                known = ", ".join(_METRICS)
                raise UserError(f"--metrics {one_line(each)}: give {known}, or FILE:NAME of your own code")
        if self.crop_share is not None and not 0 < self.crop_share <= 1:
            raise UserError(f"--crop-share: it is {self.crop_share:g}; give more than 0 and at most 1")
        if self.crop_share is not None and self.protocol in ("vit", "vit_exact"):
            raise UserError(f"--crop-share: protocol {self.protocol} shows all of an image; leave it out")
        pixel_limit(self.max_image_pixels)
        if self.tracking:
            tracking_uri()
        demand_target(self.json_file, flag="--json", force=self.force, mark='"command": "eval"')
        demand_target(self.output, flag="--output", force=self.force, mark='"format": 1', file="evaluation.json")
        count = self.processes
        if count > 1 and self.device == "cuda" and num_gpus() < count:
            raise UserError(f"--processes {count}: there are {num_gpus()} GPUs here; give as many, or --device cpu")

    @property
    def on_gpus(self) -> bool:
        return self.device != "cpu" and num_gpus() >= self.processes

    def request(self, model: Path, shards: str) -> EvalRequest:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = max(1, min(_MOST_WORKERS, cores // self.processes)) if self.on_gpus else 1
        own = {field.name for field in fields(EvalRequest)}
        shared = {name: value for name, value in vars(self).items() if name in own}
        given = self.metrics or ()
        shared["metrics"] = tuple(each for each in given if ":" not in each) or None
        codes = tuple(each for each in given if ":" in each)
        return EvalRequest(model=str(model), shards=shards, workers=workers, own_metrics=codes, **shared)


def evaluate(model: Path, shards: str, /, *, options: EvalOptions = EvalOptions()) -> int:
    """Evaluate a model on shards: top-1, top-5, loss, each class, calibration.

    MODEL: as for `shardvit predict`. SHARDS: as in a recipe, a packed folder, a
    folder or pattern of tars from other tools, or a URL. Classes are matched by
    name, in any order. The totals are identical to the last digit on any number
    of processes. Exit code 1 if an image is unreadable: it does not count.
    Non-finite outputs are an error.

    Some examples:
        shardvit eval runs/digits shards/digits-transfer/val
        shardvit eval vit_b16.npz shards/imagenet/val --labels real --processes 8
        shardvit eval vit_b16.npz shards/imagenet_v2 --labels imagenet_v2
        shardvit eval model.onnx shards/pets/val --protocol big_vision --json -
    """
    result = measured(model, shards, options=options)
    return result if isinstance(result, int) else _finish(result, options.request(model, shards), options)


def measured(model: Path, shards: str, *, options: EvalOptions) -> ModelEvaluated | int:
    """Evaluate without telling anybody; returns the exit code of the processes if they have no result."""
    options.check()
    from shardvit.pipeline.using.find_model import find_record
    from shardvit.pipeline.using.hub import local_weights

    request = options.request(model := local_weights(model), shards)
    record, opened = find_record(model), open_set(request, report=say)
    if record is not None:  # else only the weights can tell, seconds later
        what_is_asked(request, class_names=record.class_names, shards=opened[0])
    if options.processes == 1:
        from shardvit.pipeline.evaluation.evaluate_file import NoPeers, evaluate_model

        return evaluate_model(request, opened, ranks=NoPeers())
    return _by_processes(request, processes=options.processes, on_gpus=options.on_gpus)


def _by_processes(request: EvalRequest, *, processes: int, on_gpus: bool) -> ModelEvaluated | int:
    """Returns the result, or the exit code without one."""
    from shardvit.launch.local.processes import rank_environment, reason, run_ranks

    with tempfile.TemporaryDirectory(prefix="shardvit-eval-") as name:
        folder = Path(name)
        write_request(folder, request)
        hidden = {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}
        code, stopped = run_ranks(
            ["-u", "-m", "shardvit.launch.evaluation.rank", name],
            [rank_environment(rank, ranks=processes, rendezvous=folder) | hidden for rank in range(processes)],
        )
        if stopped:
            raise KeyboardInterrupt
        if code == EXIT_USER_ERROR:
            return code
        if code:
            say(f"the evaluation failed: {reason(code, out_of_memory=None)}")
            return 1
        return read_result(folder)


def _finish(result: ModelEvaluated, request: EvalRequest, options: EvalOptions) -> int:
    from shardvit.pipeline.evaluation.scores import one_answer
    from shardvit.pipeline.runs.evaluations import write_evaluation

    say_model(request.model, origin=result.origin, notes=result.notes)
    for fault in result.damaged[:_NAMED_FAULTS]:
        say(f"image {fault.key!r} of {fault.shard} is damaged ({fault.reason}): it does not count")
    if len(result.damaged) > _NAMED_FAULTS:
        say(f"{len(result.damaged):,} images are damaged in all")
    if result.unlabelled:
        say(f"{result.unlabelled:,} images have no ReaL label and do not count")
    if warning := one_answer(result.evaluation):
        say(warning)
    as_json = json.dumps(_as_json(result), indent=1)
    tell_result(_as_text(result), as_json=as_json, json_file=options.json_file)
    try:
        if options.output is not None:
            write_evaluation(options.output, result.evaluation)
    except OSError as error:
        raise UserError(f"{error.filename or options.output} cannot be written: {error.strerror}") from None
    if options.tracking:
        track(result, request, processes=options.processes)
    return 1 if result.damaged else 0


def _as_text(result: ModelEvaluated) -> str:
    evaluation = result.evaluation
    crop = "" if result.crop_share is None else f", crop share {result.crop_share:g}"
    head = (
        f"{evaluation.images:,} images of {one_line(result.source)}, {result.image_size} px, protocol "
        f"{result.protocol}{crop}"
    )
    metrics = evaluation.metrics
    rows = [
        [words, f"{metrics[name]:.4f}" if name == "val/loss" else f"{100 * metrics[name]:.2f} %"]
        for name, words in WORDS.items()
        if name in metrics
    ]
    rows += [[name.partition("/")[2], f"{value:.4f}"] for name, value in metrics.items() if name not in METRICS]
    counts = evaluation.per_class
    known = [number for number, images in enumerate(counts.images.tolist()) if images]
    worst = sorted(known, key=lambda number: (counts.accuracy[number], number))[:_SHOWN_CLASSES]
    shown = known if len(known) <= _SHOWN_CLASSES else worst
    per_class = [
        ["class", "images", "right", "accuracy"],
        *(
            [one_line(evaluation.classes[at]), f"{images:,}", f"{right:,}", f"{100 * counts.accuracy[at]:.2f} %"]
            for at, images, right in ((at, counts.images[at], counts.right[at]) for at in shown)
        ),
    ]
    which = "" if len(known) <= _SHOWN_CLASSES else f"the {len(shown)} worst of {len(known):,} classes\n"
    return f"{head}\n\n{table(rows, align='lr')}\n\n{which}{table(per_class, align='lrrr', heading='ruled')}"


def _as_json(result: ModelEvaluated) -> dict[str, object]:
    evaluation, counts = result.evaluation, result.evaluation.per_class
    return {
        "command": "eval",
        **_facts(result),
        "digest": result.digest,
        "images": evaluation.images,
        "damaged_images": len(result.damaged),
        "unlabelled_images": result.unlabelled,
        "metrics": result.metrics,
        "classes": [
            {"class": name, "images": images, "right": right}
            | ({} if counts.average_precision is None else {"average_precision": _number(counts.average_precision[at])})
            for at, (name, images, right) in enumerate(
                zip(evaluation.classes, counts.images.tolist(), counts.right.tolist(), strict=True)
            )
            if images
        ],
        "confused": _confused(result),
    }


def _facts(result: ModelEvaluated) -> dict[str, object]:
    facts = {name: getattr(result, name) for name in ("protocol", "crop_share", "image_size")}
    return {"model": result.origin, "shards": result.source, **facts}


def _number(value: float) -> float | None:
    return None if value != value else float(value)


def _confused(result: ModelEvaluated) -> list[dict[str, object]]:
    confusion, names = result.evaluation.confusion, result.evaluation.classes
    if confusion is None:
        return []
    pairs = [(int(true), int(best)) for true, best in zip(*confusion.nonzero(), strict=True) if true != best]
    pairs.sort(key=lambda pair: (-int(confusion[pair]), *pair))
    return [
        {"true": names[true], "predicted": names[best], "images": int(confusion[true, best])}
        for true, best in pairs[:_SHOWN_PAIRS]
    ]


def track(result: ModelEvaluated, request: EvalRequest, *, processes: int) -> None:
    """Make an MLflow run of the result."""
    from shardvit.pipeline.tracking.command_runs import CommandResult, log_result
    from shardvit.pipeline.tracking.facts import DatasetInput
    from shardvit.pipeline.transfer.results import model_origin

    counts, evaluation = result.evaluation.per_class, result.evaluation
    origin = model_origin(result.origin)
    tracked = CommandResult(
        name=f"eval-{Path(request.model).name}-{result.set_name}",
        kind="eval",
        params={
            **_facts(result),
            "labels": request.labels,
            "classes": request.classes,
            "among": request.among,
            "processes": processes,
            "batch_size": request.batch_size,
        },
        metrics=evaluation.metrics,
        datasets=[DatasetInput(name=result.set_name, source=result.source, digest=result.digest, context="eval")],
        tables={
            "per_class": {
                "class": [one_line(name) for name in evaluation.classes],
                "images": counts.images.tolist(),
                "right": counts.right.tolist(),
            }
        },
        of_run=origin.run,
    )
    log_result(tracked, tracking_uri=tracking_uri(), experiment=experiment_name(), say=say)
