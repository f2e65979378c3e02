"""Evaluate a model of any format on any shards: the work of each `shardvit eval` process.

Runs in float32, as `shardvit predict` does; training evaluates in the stage's precision. Batches hold the same samples
on any number of processes. A process reads ahead with threads and holds the model and a few batches.
"""

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch, Fault
from shardvit.data_shards.loading.device_prefetch import prefetch_to_device
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.vocabulary import EvalProtocol, Normalisation
from shardvit.model.loss import loss_function
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.model.vocabulary import LOSSES
from shardvit.pipeline.evaluation.evaluate import Exchange, evaluate
from shardvit.pipeline.evaluation.truth import EvalRequest, Truth, what_is_asked
from shardvit.pipeline.kernels.settle import fp32_products
from shardvit.pipeline.own_code.by_path import load_own, trust_file
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.runs.evaluations import Evaluation
from shardvit.pipeline.stage.task import Classification
from shardvit.pipeline.using.predict import Predictor, channels_of, open_predictor


@dataclass(frozen=True)
class ModelEvaluated:
    """Result, equal on every process."""

    evaluation: Evaluation
    origin: str  # source of the model
    notes: tuple[str, ...]
    set_name: str
    source: str
    digest: str  # the shards'
    protocol: EvalProtocol
    crop_share: float | None
    image_size: int
    damaged: tuple[Fault, ...]  # left out
    unlabelled: int  # readable images without a ReaL label, which do not count

    @property
    def metrics(self) -> dict[str, float]:
        """`top1`, `loss`, ..., as in the command's JSON."""
        return {name.removeprefix("val/"): float(value) for name, value in self.evaluation.metrics.items()}


class NoPeers:
    """Exchange of a single process."""

    place = Place()

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().to("cpu", torch.float64).flatten()[None]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


@dataclass
class _Labelled:
    """Relabel batches; count damaged and unlabelled images."""

    truth: Truth
    damaged: dict[tuple[str, str], Fault] = field(default_factory=dict)
    unlabelled: int = 0

    def batches(self, part: EvalBatches, *, workers: int) -> Iterator[Batch]:
        with closing(eval_batches(part, workers=workers, kind="thread")) as read:
            for batch in read:
                labelled = self.truth.relabelled(batch)
                self.unlabelled += int(batch.counted.sum() - labelled.counted.sum())
                yield labelled

    def note(self, batch: Batch, *, use: str, rows: int) -> None:
        self.damaged |= {(fault.shard, fault.key): fault for fault in batch.faults}


def evaluate_model(
    request: EvalRequest, opened: tuple[ShardSet, Store | None], *, ranks: Exchange, predictor: Predictor | None = None
) -> ModelEvaluated:
    """Evaluate this process's part of `opened` (see `open_set`) and return the result of all; collective. UserError if
    model, shards or classes do not fit or are broken. `predictor`: the model, if it is open already."""
    shards, store = opened
    if predictor is None:
        trust_file(request.trust)
        predictor = open_predictor(Path(request.model), device=request.device, weights=request.weights)
    meta = predictor.meta
    truth, metrics = what_is_asked(request, class_names=meta.class_names, shards=shards)
    protocol, crop_share = _preprocessing(request, meta)
    own = {each.rpartition(":")[2]: load_own(each) for each in request.own_metrics}
    part = EvalBatches(
        Access(
            shards,
            store=store,
            pixel_limit=PixelLimit(request.max_image_pixels),
            on_corrupt="substitute",
            channels=channels_of(shards, meta),
        ),
        transform=EvalTransform(meta.image_size, protocol=protocol, crop_share=crop_share),
        rank=ranks.place.rank,
        world_size=ranks.place.world_size,
        batch_size=request.batch_size,
    )
    labelled, task = _Labelled(truth), _task(predictor, truth)
    batches: Any = labelled.batches(part, workers=request.workers)
    with closing(prefetch_to_device(batches, device=predictor.device)) as read:
        evaluation = evaluate(read, task=task, ranks=ranks, faults=labelled, metrics=metrics, own=own).record
    assert evaluation is not None
    if evaluation.images and not math.isfinite(evaluation.metrics["val/loss"]):
        raise UserError(f"{predictor.origin}: the model gives outputs that are not finite: its weights are damaged")
    takes_several = LOSSES[meta.loss].takes_several_labels
    if request.labels == "real" or (truth.label_kind == "multi" and not takes_several):
        values = {name: value for name, value in evaluation.metrics.items() if name != "val/loss"}
        evaluation = replace(evaluation, metrics=values)  # softmax has no loss for several labels
    parts = ranks.gather_objects((labelled.damaged, labelled.unlabelled))
    every = {key: fault for found_here, _ in parts for key, fault in found_here.items()}
    return ModelEvaluated(
        evaluation=evaluation,
        origin=predictor.origin,
        notes=predictor.notes,
        set_name=shards.name,
        source=shards.source,
        digest=shards.digest,
        protocol=protocol,
        crop_share=crop_share,
        image_size=meta.image_size,
        damaged=tuple(every[key] for key in sorted(every)),
        unlabelled=sum(count for _, count in parts),
    )


def _preprocessing(request: EvalRequest, meta: SavedModelMeta) -> tuple[EvalProtocol, float | None]:
    protocol, crop_share = meta.eval_protocol, meta.eval_crop_share
    if request.protocol not in (None, protocol):
        protocol, crop_share = request.protocol, None
    if request.crop_share is not None and protocol in ("vit", "vit_exact"):
        raise UserError(
            f"--crop-share: the model is evaluated by protocol {protocol}, which shows all of an image; give "
            "--protocol big_vision or timm, too"
        )
    return protocol, crop_share if request.crop_share is None else request.crop_share


def _task(predictor: Predictor, truth: Truth) -> Classification:
    """Wrap the model as a task; the engine has only the attributes that evaluation uses."""
    meta = predictor.meta
    chosen = None if truth.columns is None else torch.tensor(truth.columns, device=predictor.device)

    @torch.inference_mode()
    def logits(images: torch.Tensor) -> torch.Tensor:
        with fp32_products("ieee"):
            every = predictor.logits(images).float()
        return every if chosen is None else every[:, chosen]

    engine: Any = SimpleNamespace(
        device=predictor.device, input_dtype=torch.float32, module=torch.nn.Module(), predict=logits
    )
    return Classification(
        engine=engine,
        classes=truth.classes,
        label_kind=truth.label_kind,
        normalisation=Normalisation(mean=meta.mean, std=meta.std),
        train_loss=loss_function(meta.loss),
        loss_kind=meta.loss,
    )
