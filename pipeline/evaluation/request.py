"""The request of `shardvit eval`: plain values without torch, as the command line imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data_shards.vocabulary import EvalProtocol, LabelKind
from pipeline.recipe.vocabulary import EvalMetric, WeightsKind

LabelSet = Literal["shards", "real", "imagenet_v2"]
Matching = Literal["names", "index"]
Among = Literal["model", "shards"]


@dataclass(frozen=True)
class EvalRequest:
    """Model, shards and settings of an evaluation; plain values, sent to processes as JSON."""

    model: str
    shards: str
    max_image_pixels: int
    label: str | None = None  # this and the next two: of tars without a manifest
    label_kind: LabelKind = "single"
    class_file: str | None = None
    label_set: LabelSet = "shards"
    matching: Matching = "names"
    among: Among = "model"
    metrics: tuple[EvalMetric, ...] | Literal["auto"] = "auto"
    protocol: EvalProtocol | None = None  # None: the model's record says it; crop_share likewise
    crop_share: float | None = None
    weights: WeightsKind | None = None
    batch_images: int = 64
    workers: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
