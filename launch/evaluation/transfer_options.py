"""Flags of `shardvit transfer`. Imports nothing heavy, since --help reads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.vocabulary import USUAL_MOST_PIXELS
from shardvit.launch.flags import (
    Device,
    Force,
    JsonFile,
    MaxImagePixels,
    TarClasses,
    TarLabel,
    WhichWeights,
    demand_counts,
    demand_target,
    flag_mistake,
    pixel_limit,
)
from shardvit.launch.local.env import tracking_uri
from shardvit.pipeline.recipe.vocabulary import FeatureLayer

if TYPE_CHECKING:
    from shardvit.pipeline.transfer.settings import Settings

Method = Literal["fewshot", "probe", "knn"]


def _several(words: str) -> Parameter:
    return Parameter(consume_multiple=True, negative="", help=words)


Ints = tuple[int, ...] | None
Floats = tuple[float, ...] | None


@Parameter(name="*")
@dataclass(frozen=True)
class MethodOptions:
    """Options of the methods; None: the method's default."""

    shots: Annotated[Ints, _several("fewshot: images of each class; default: 5 10 25.")] = None
    seeds: Annotated[int | None, Parameter(help="fewshot: draws to average over; default: 3.")] = None
    l2: Annotated[Floats, _several("fewshot: regularisation; of several, the best; default: 1024.")] = None
    c: Annotated[Floats, _several("probe: scikit-learn's C; of several, the best; default: 1e-5 to 10.")] = None
    hold_out: Annotated[float | None, Parameter(help="probe: share of TRAIN_SHARDS to choose C by; default: 0.2.")] = (
        None
    )
    k: Annotated[Ints, _several("knn: neighbours; default: 20.")] = None
    temperature: Annotated[
        float | None, Parameter(help="knn: a vote weighs exp(cosine / temperature); default: 0.07.")
    ] = None

    def given(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def settings(self, method: Method) -> Settings:
        """Validate the method's settings; UserError for a flag of another method or a value out of range."""
        from pydantic import ValidationError

        from shardvit.pipeline.transfer.settings import FewShotSettings, KnnSettings, ProbeSettings

        kind = {"fewshot": FewShotSettings, "probe": ProbeSettings, "knn": KnnSettings}[method]
        for name in self.given().keys() - kind.model_fields.keys():
            raise UserError(f"--{name.replace('_', '-')}: --method {method} has no such option: leave it out")
        try:
            return kind.model_validate(self.given())
        except ValidationError as error:
            raise flag_mistake(error) from None


@Parameter(name="*")
@dataclass(frozen=True)
class TransferOptions:
    """Flags for computing features and for the result."""

    images: Annotated[int | None, Parameter(help="Most training images, always the same ones; VTAB-1k: 1000.")] = None
    name: Annotated[str | None, Parameter(help="Data set's name in the result; default: the shards'.")] = None
    label: TarLabel = None
    classes: TarClasses = None
    layer: Annotated[FeatureLayer, Parameter(help="Feature layer.")] = "pre_logits"
    weights: WhichWeights = None
    device: Device = "auto"
    batch_size: Annotated[int, Parameter(help="Images of a forward pass.")] = 64
    workers: Annotated[int | None, Parameter(help="Reading threads; default: one a core, up to 16.")] = None
    features: Annotated[Path | None, Parameter(help="Folder of kept features; default: in ~/.cache/shardvit.")] = None
    json_file: JsonFile = None
    force: Force = False
    tracking: Annotated[
        bool, Parameter(name="--tracking", negative="--no-tracking", help="Make an MLflow run of the result.")
    ] = True
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS

    def check(self, model: object, *, command: str) -> None:
        """UserError: a bad number or MLflow address, an output that `command` must not replace, or no model."""
        from shardvit.pipeline.using.find_model import find_record

        demand_counts(batch_size=self.batch_size, workers=self.workers, images=self.images)
        pixel_limit(self.max_image_pixels)
        demand_target(self.json_file, flag="--json", force=self.force, mark=f'"command": "{command}"')
        if self.tracking:
            tracking_uri()
        if isinstance(model, Path):
            find_record(model)
