"""The flags that the four commands share. Imports nothing heavy: --help reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from data_shards.vocabulary import USUAL_MOST_PIXELS
from launch.flags import Device, MaxImagePixels, TarClasses, TarLabel, WhichWeights, demand_counts, pixel_limit
from launch.local.env import tracking_uri
from launch.target import Force, JsonFile, demand_target

MostImages = Annotated[
    int | None, Parameter(help="So many training images at most, always the same ones; VTAB-1k has 1000.")
]


@dataclass(frozen=True)
class TransferOptions:
    """How features are computed, and where the result goes."""

    layer: Annotated[
        Literal["pre_logits", "pooled"],
        Parameter(
            help="pre_logits: what the last linear layer is given, as big_vision; pooled: the trunk's pooled output, "
            "before the hidden layer of an MLP head, too."
        ),
    ] = "pre_logits"
    weights: WhichWeights = None
    device: Device = "auto"
    batch_size: Annotated[int, Parameter(help="Images that the model sees at a time.")] = 64
    workers: Annotated[
        int | None, Parameter(help="Threads that read and decode images; default: one a core, at most 16.")
    ] = None
    features: Annotated[
        Path | None, Parameter(help="Folder for features, which are computed once; default: in ~/.cache/shardvit.")
    ] = None
    json_file: JsonFile = None
    force: Force = False
    tracking: Annotated[
        bool, Parameter(name="--tracking", negative="--no-tracking", help="Make an MLflow run of the result.")
    ] = True
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS

    def check(self, model: Path, *, command: str) -> None:
        """UserError: a number or MLflow's address is none, `command` may not replace a file, or there is no model."""
        from pipeline.using.find_model import find_record

        demand_counts(batch_size=self.batch_size, workers=self.workers)
        pixel_limit(self.max_image_pixels)
        demand_target(self.json_file, flag="--json", force=self.force, mark=f'"command": "{command}"')
        if self.tracking:
            tracking_uri()
        find_record(model)


@dataclass(frozen=True)
class SetOptions(TransferOptions):
    """And of one data set, how it is read and called."""

    name: Annotated[str | None, Parameter(help="Of the data set, in the result; default: its shards'.")] = None
    label: TarLabel = None
    classes: TarClasses = None
    images: MostImages = None

    def check(self, model: Path, *, command: str) -> None:
        super().check(model, command=command)
        demand_counts(images=self.images)
