"""`shardvit.pack`, `evaluate` and `transfer`: the commands as functions, the last two also on a model in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_set import Report, ShardSet
from shardvit.data_shards.vocabulary import GOOGLES
from shardvit.launch.api.loaded_run import LoadedRun
from shardvit.launch.api.options import PathLike, options_of
from shardvit.launch.api.running import RunFailed
from shardvit.launch.evaluation.transfer_options import Method, MethodOptions, TransferOptions
from shardvit.model.vocabulary import LossKind

if TYPE_CHECKING:
    from torch import nn

    from shardvit.data_shards.packing.found import PackReport
    from shardvit.launch.api.shard_loader import OpenedShards
    from shardvit.pipeline.evaluation.evaluate_file import ModelEvaluated
    from shardvit.pipeline.transfer.results import TransferRecord
    from shardvit.pipeline.using.predict import Predictor

Channels = tuple[float, ...]


def pack(source: PathLike, out: PathLike, *, report: Report = print, **options: Any) -> PackReport:
    """Pack images into WebDataset shards with a manifest, as `shardvit pack` does; called again, it resumes.

    Args:
        source: a folder or tar of class folders, "digits", or a data set as published.
        out: gets a folder per split.
        report: gets lines of progress.
        options: those of the command, such as `holdout=0.1`; `classes` is a list.

    Returns:
        A frozen record: `train`, `val`, `num_images`, `counts` of duplicates and unreadable images.

    Raises:
        UserError: bad input, an `out` of another source, unreadable images, a full disk.

    Example:
        shardvit.pack("digits", "shards", holdout=0.2)
    """
    from shardvit.data_shards.packing.pack import pack as pack_images
    from shardvit.launch.commands.data.pack import PackOptions

    classes = options.pop("classes", None)
    request = options_of(PackOptions, options).request()
    request["classes"] = classes and list(classes)
    return pack_images(os.fspath(source), os.fspath(out), report=report, **request)


def evaluate(
    model: LoadedRun | nn.Module | PathLike,
    shards: OpenedShards | PathLike,
    *,
    image_size: int | None = None,
    class_names: Sequence[str] | None = None,
    mean: Channels = GOOGLES.mean,
    std: Channels = GOOGLES.std,
    loss: LossKind = "softmax",
    **options: Any,
) -> ModelEvaluated:
    """Evaluate a model on shards, as `shardvit eval` does: each readable image counts once.

    Args:
        model: a run, a path as for `shardvit predict`, or a module: images [B, 3, S, S] -> logits [B, classes].
        shards: a location, or the result of `open_shards`.
        image_size: S, needed for a module of one's own, to which the next four apply, too.
        class_names: of the module's logits, in order; None: the shards' classes.
        mean: of each channel, subtracted from pixels in [0, 1].
        std: by which they are then divided.
        loss: "softmax" or "sigmoid".
        options: those of the command, such as `metrics=["top5"]`, `batch_size=64` or `processes=8`. `tracking=True`
            makes an MLflow run of the result. A module of one's own stays on its device.

    Returns:
        A frozen record: `metrics` (`top1`, `loss`, ...), `evaluation` (per class, confusion, ...), `damaged`.

    Raises:
        UserError: model, shards or classes do not fit, or are broken.

    Example:
        shardvit.evaluate("runs/digits", "shards/val").metrics["top1"]
    """
    from shardvit.launch.commands.models.evaluate import EvalOptions, measured, track
    from shardvit.launch.local.output import say
    from shardvit.pipeline.evaluation.truth import open_set

    flags = options_of(EvalOptions, {"tracking": False} | options)
    path, location = _path_of(model), shards.source if isinstance(shards, ShardSet) else os.fspath(shards)
    request = flags.request(path or Path(type(model).__name__), location)
    if path is not None and not isinstance(shards, ShardSet):
        result = measured(path, location, options=flags)
        if isinstance(result, int):
            raise RunFailed(f"the evaluation of {path} failed: the lines above have the cause")
    else:
        if flags.processes > 1:
            raise UserError("processes: a module, or shards that are open, are evaluated in this process: leave it out")
        from shardvit.pipeline.evaluation.evaluate_file import NoPeers, evaluate_model

        flags.check()
        opened = (shards, shards.store) if isinstance(shards, ShardSet) else open_set(request, report=say)
        names = opened[0].classes if class_names is None else class_names
        predictor = None if path is not None else _predictor(model, image_size, names, (mean, std), loss)
        result = evaluate_model(request, opened, ranks=NoPeers(), predictor=predictor)
    if flags.tracking:
        track(result, request, processes=flags.processes)
    return result


def transfer(
    model: LoadedRun | nn.Module | PathLike,
    train_shards: PathLike,
    eval_shards: PathLike | None = None,
    *,
    method: Method | None = None,
    **options: Any,
) -> TransferRecord:
    """Measure a model's features on other images, as `shardvit transfer` does; features are kept for the next call.

    Args:
        model: a run, the model of one, or a path as for `shardvit predict`.
        train_shards: shards to learn from or, without `eval_shards`, a table of data sets, TABLE.yaml.
        eval_shards: shards to classify.
        method: "fewshot", "probe" or "knn"; a table names its own.
        options: those of the command, such as `shots=[5, 10]`, `k=[20]` or `layer="pooled"`. `tracking=True` makes an
            MLflow run of the result.

    Returns:
        A frozen record: `results` (`metric`, `value`, `settings` of each), `data_sets`, `mean`. It is also kept as a
        file: in the run, or beside the features.

    Raises:
        UserError: model, shards or options do not fit.

    Example:
        shardvit.transfer(run, "shards/train", "shards/val", method="knn", k=[20]).results[0].value
    """
    from shardvit.launch.commands.models.transfer import measured

    of_method = options_of(MethodOptions, options, beside=TransferOptions)
    flags = options_of(TransferOptions, {"tracking": False} | options, beside=MethodOptions)
    sets = os.fspath(train_shards), None if eval_shards is None else os.fspath(eval_shards)
    outcome = measured(_path_of(model) or _predictor(model), *sets, method=method, of_method=of_method, options=flags)
    if flags.tracking:
        outcome.session.log(outcome.record, outcome.file, params=outcome.params)
    return outcome.record


def _path_of(model: LoadedRun | nn.Module | PathLike) -> Path | None:
    if isinstance(model, LoadedRun):
        return model.path
    return Path(model) if isinstance(model, str | os.PathLike) else None


def _predictor(
    model: Any,
    image_size: int | None = None,
    class_names: Sequence[str] = (),
    normalisation: tuple[Channels, Channels] = (GOOGLES.mean, GOOGLES.std),
    loss: LossKind = "softmax",
) -> Predictor:
    """Wrap a module; the record of one of the user's own lacks the sizes, which no evaluation reads."""
    import torch

    from shardvit.launch.api.loaded_model import LoadedModel
    from shardvit.model.saved.model_folder import SavedModelMeta
    from shardvit.pipeline.using.predict import Predictor

    if isinstance(model, LoadedModel):
        return model.as_predictor()
    name = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{name} is no model: give a run, a path, or a torch.nn.Module")
    if image_size is None:
        raise UserError(f"{name} does not know its image_size: evaluate: give it; transfer: give a run, or its model")
    meta = SavedModelMeta.model_construct(
        image_size=image_size,
        num_classes=len(class_names),
        class_names=tuple(class_names),
        head="linear",
        mean=normalisation[0],
        std=normalisation[1],
        loss=loss,
    )

    def logits(images: torch.Tensor) -> torch.Tensor:
        was_training = model.training
        try:
            return model.eval()(images)
        finally:
            model.train(was_training)

    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return Predictor(meta, logits, device=device, origin=f"{name} of this process")
