"""`shardvit.evaluate` and `shardvit.transfer`: the commands as functions, also on a model in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.vocabulary import GOOGLES, EvalProtocol
from shardvit.launch.api.loaded_run import LoadedRun
from shardvit.launch.api.running import PathLike, RunFailed
from shardvit.launch.evaluation.transfer_options import Method
from shardvit.launch.flags import Device
from shardvit.model.vocabulary import LossKind
from shardvit.pipeline.evaluation.truth import Among, LabelSet, Matching
from shardvit.pipeline.recipe.vocabulary import EvalMetric, FeatureLayer, WeightsKind

if TYPE_CHECKING:
    from torch import nn

    from shardvit.launch.api.shard_loader import OpenedShards
    from shardvit.pipeline.evaluation.evaluate_file import ModelEvaluated
    from shardvit.pipeline.transfer.results import TransferRecord
    from shardvit.pipeline.using.predict import Predictor

Channels = tuple[float, float, float]


def evaluate(
    model: LoadedRun | nn.Module | PathLike,
    shards: OpenedShards | PathLike,
    *,
    image_size: int | None = None,
    class_names: Sequence[str] | None = None,
    mean: Channels = GOOGLES.mean,
    std: Channels = GOOGLES.std,
    loss: LossKind = "softmax",
    protocol: EvalProtocol | None = None,
    crop_share: float | None = None,
    metrics: Sequence[EvalMetric] | None = None,
    labels: LabelSet = "shards",
    classes: Matching = "names",
    among: Among = "model",
    weights: WeightsKind | None = None,
    processes: int = 1,
    batch_size: int = 64,
    device: Device = "auto",
    tracking: bool = False,
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
        protocol: resizing and cropping; None: as the model's record says ("vit" for a module of one's own).
        crop_share: crop's side over the resized short side.
        metrics: beyond loss and top-1; None: those that fit.
        labels: "real" or "imagenet_v2" instead of the shards' own.
        classes: match by "names", or trust the order ("index").
        among: predict among the "model"'s classes or only the "shards'".
        weights: "weights" or "ema" of a checkpoint that has both.
        processes: on this machine, for a run or a path.
        batch_size: images of a forward pass.
        device: "auto": a GPU, if any. A module of one's own stays where it is.
        tracking: make an MLflow run of the result.

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

    asked = None if metrics is None else tuple(metrics)
    options = EvalOptions(protocol, crop_share, asked, labels, classes, among, weights, processes, batch_size)
    options = replace(options, device=device, tracking=tracking)
    path = _path_of(model)
    location = shards.source if isinstance(shards, ShardSet) else os.fspath(shards)
    if path is not None and not isinstance(shards, ShardSet):
        request, result = options.request(path, location), measured(path, location, options=options)
        if isinstance(result, int):
            raise RunFailed(f"the evaluation of {path} failed: the lines above have the cause")
    else:
        if processes > 1:
            raise UserError("processes: a module, or shards that are open, are evaluated in this process: leave it out")
        from shardvit.pipeline.evaluation.evaluate_file import NoPeers, evaluate_model

        options.check()
        request = options.request(path or Path(type(model).__name__), location)
        opened = (shards, shards.store) if isinstance(shards, ShardSet) else open_set(request, report=say)
        predictor = None
        if path is None:
            names = opened[0].classes if class_names is None else tuple(class_names)
            predictor = _predictor(model, image_size, names, (mean, std), loss)  # pyright: ignore[reportArgumentType]
        result = evaluate_model(request, opened, ranks=NoPeers(), predictor=predictor)
    if tracking:
        track(result, request, processes=processes)
    return result


def transfer(
    model: LoadedRun | nn.Module | PathLike,
    train_shards: PathLike,
    eval_shards: PathLike | None = None,
    *,
    method: Method | None = None,
    shots: Sequence[int] | None = None,
    seeds: int | None = None,
    l2: Sequence[float] | None = None,
    c: Sequence[float] | None = None,
    hold_out: float | None = None,
    k: Sequence[int] | None = None,
    temperature: float | None = None,
    images: int | None = None,
    name: str | None = None,
    layer: FeatureLayer = "pre_logits",
    weights: WeightsKind | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    features: PathLike | None = None,
    device: Device = "auto",
    tracking: bool = False,
) -> TransferRecord:
    """Measure a model's features on other images, as `shardvit transfer` does; features are kept for the next call.

    Args:
        model: a run, the model of one, or a path as for `shardvit predict`.
        train_shards: shards to learn from or, without `eval_shards`, a table of data sets, TABLE.yaml.
        eval_shards: shards to classify.
        method: "fewshot", "probe" or "knn"; a table names its own.
        shots: fewshot: images of each class; None: 5, 10, 25.
        seeds: fewshot: draws to average over; None: 3.
        l2: fewshot: regularisation; of several, the best; None: 1024.
        c: probe: scikit-learn's C; of several, the best; None: 1e-5 to 10.
        hold_out: probe: share of the training images to choose C by; None: 0.2.
        k: knn: neighbours; None: 20.
        temperature: knn: a vote weighs exp(cosine / temperature); None: 0.07.
        images: most training images, always the same ones.
        name: the data set's, in the result; None: the shards'.
        layer: "pre_logits" or "pooled".
        weights: "weights" or "ema" of a checkpoint that has both.
        batch_size: images of a forward pass.
        workers: reading threads; None: one a core, up to 16.
        features: folder of kept features; None: in ~/.cache/shardvit.
        device: "auto": a GPU, if any.
        tracking: make an MLflow run of the result.

    Returns:
        A frozen record: `results` (`metric`, `value`, `settings` of each), `data_sets`, `mean`. It is also kept as a
        file: in the run, or beside the features.

    Raises:
        UserError: model, shards or options do not fit.

    Example:
        shardvit.transfer(run, "shards/train", "shards/val", method="knn", k=[20]).results[0].value
    """
    from shardvit.launch.commands.models.transfer import measured
    from shardvit.launch.evaluation.transfer_options import MethodOptions, TransferOptions

    several = {"shots": shots, "l2": l2, "c": c, "k": k}
    of_method = MethodOptions(seeds=seeds, hold_out=hold_out, temperature=temperature)
    of_method = replace(of_method, **{key: tuple(each) for key, each in several.items() if each is not None})
    options = TransferOptions(images, name, layer=layer, weights=weights, device=device, batch_size=batch_size)
    folder = None if features is None else Path(features)
    options = replace(options, workers=workers, features=folder, tracking=tracking)
    given = _path_of(model) or _predictor(model)  # pyright: ignore[reportArgumentType]
    sets = os.fspath(train_shards), None if eval_shards is None else os.fspath(eval_shards)
    outcome = measured(given, *sets, method=method, of_method=of_method, options=options)
    if tracking:
        outcome.session.log(outcome.record, outcome.file, params=outcome.params)
    return outcome.record


def _path_of(model: LoadedRun | nn.Module | PathLike) -> Path | None:
    if isinstance(model, LoadedRun):
        return model.path
    return Path(model) if isinstance(model, str | os.PathLike) else None


def _predictor(
    model: nn.Module,
    image_size: int | None = None,
    class_names: Sequence[str] = (),
    normalisation: tuple[Channels, Channels] = (GOOGLES.mean, GOOGLES.std),
    loss: LossKind = "softmax",
) -> Predictor:
    """Wrap a module; one of the user's own has a record without sizes, which no evaluation reads."""
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
        raise UserError(
            f"image_size: give that of {name}, in pixels; only models of runs know their own (transfer: one)"
        )
    meta = SavedModelMeta.model_construct(
        image_size=image_size,
        num_classes=len(class_names),
        class_names=tuple(class_names),
        head="linear",
        mean=normalisation[0],
        std=normalisation[1],
        loss=loss,
    )
    device = next((each.device for each in model.parameters()), torch.device("cpu"))

    def logits(images: torch.Tensor) -> torch.Tensor:
        was_training = model.training
        try:
            return model.eval()(images)
        finally:
            model.train(was_training)

    return Predictor(meta, logits, device=device, origin=f"{name} of this process")
