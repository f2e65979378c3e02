"""`shardvit transfer`: the command line; imports are inside, so that --help is fast."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from data_shards.errors import UserError
from data_shards.vocabulary import USUAL_MOST_PIXELS
from launch.flags import (
    Device,
    MaxImagePixels,
    TarClasses,
    TarLabel,
    WhichWeights,
    demand_counts,
    flag_mistake,
    pixel_limit,
)
from launch.local.env import tracking_uri
from launch.target import Force, JsonFile, demand_target

if TYPE_CHECKING:
    from pipeline.transfer.settings import Settings

Method = Literal["fewshot", "probe", "knn"]
_FLAGS = {"fewshot": ("shots", "seeds", "l2"), "probe": ("c", "hold_out"), "knn": ("k", "temperature")}


@Parameter(name="*")
@dataclass(frozen=True)
class MethodOptions:
    """Options of the methods; None: the method's default."""

    shots: Annotated[
        tuple[int, ...] | None,
        Parameter(consume_multiple=True, negative="", help="fewshot: images of each class; default: 5 10 25."),
    ] = None
    seeds: Annotated[int | None, Parameter(help="fewshot: how often they are drawn; the mean counts; default: 3.")] = (
        None
    )
    l2: Annotated[
        tuple[float, ...] | None,
        Parameter(
            consume_multiple=True,
            negative="",
            help="fewshot: regularisation; of several the least leave-one-out error wins; default: 1024.",
        ),
    ] = None
    c: Annotated[
        tuple[float, ...] | None,
        Parameter(
            consume_multiple=True,
            negative="",
            help="probe: scikit-learn's C; of several the best on the held-out part; default: 1e-5 to 10.",
        ),
    ] = None
    hold_out: Annotated[float | None, Parameter(help="probe: share of TRAIN_SHARDS that chooses C; default: 0.2.")] = (
        None
    )
    k: Annotated[
        tuple[int, ...] | None, Parameter(consume_multiple=True, negative="", help="knn: neighbours; default: 20.")
    ] = None
    temperature: Annotated[
        float | None, Parameter(help="knn: a vote weighs exp(cosine / temperature); default: 0.07.")
    ] = None

    def given(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def settings(self, method: Method) -> Settings:
        """UserError: a flag of another method, or a value out of range."""
        from pydantic import ValidationError

        from pipeline.transfer.settings import FewShotSettings, KnnSettings, ProbeSettings

        for name in self.given().keys() - _FLAGS[method]:
            raise UserError(f"--{name.replace('_', '-')}: --method {method} has no such option: leave it out")
        kinds = {"fewshot": FewShotSettings, "probe": ProbeSettings, "knn": KnnSettings}
        try:
            return kinds[method].model_validate(self.given())
        except ValidationError as error:
            raise flag_mistake(error) from None


@Parameter(name="*")
@dataclass(frozen=True)
class TransferOptions:
    """How features are computed, and where the result goes."""

    images: Annotated[
        int | None, Parameter(help="Training images at most, always the same ones; VTAB-1k has 1000.")
    ] = None
    name: Annotated[str | None, Parameter(help="Data set's name in the result; default: its shards'.")] = None
    label: TarLabel = None
    classes: TarClasses = None
    layer: Annotated[
        Literal["pre_logits", "pooled"],
        Parameter(help="Input of the last linear layer (as big_vision), or the trunk's pooled output."),
    ] = "pre_logits"
    weights: WhichWeights = None
    device: Device = "auto"
    batch_size: Annotated[int, Parameter(help="Images of a forward pass.")] = 64
    workers: Annotated[
        int | None, Parameter(help="Threads that read and decode images; default: one a core, at most 16.")
    ] = None
    features: Annotated[
        Path | None, Parameter(help="Folder where computed features are kept; default: in ~/.cache/shardvit.")
    ] = None
    json_file: JsonFile = None
    force: Force = False
    tracking: Annotated[
        bool, Parameter(name="--tracking", negative="--no-tracking", help="Make an MLflow run of the result.")
    ] = True
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS

    def check(self, model: Path, *, command: str) -> None:
        """UserError: a bad number or MLflow address, a file that `command` may not replace, or no model."""
        from pipeline.using.find_model import find_record

        demand_counts(batch_size=self.batch_size, workers=self.workers, images=self.images)
        pixel_limit(self.max_image_pixels)
        demand_target(self.json_file, flag="--json", force=self.force, mark=f'"command": "{command}"')
        if self.tracking:
            tracking_uri()
        find_record(model)


def transfer(
    model: Path,
    source: Annotated[str, Parameter(help="TRAIN_SHARDS, or TABLE.yaml")],
    eval_shards: str | None = None,
    /,
    *,
    method: Method | None = None,
    of_method: MethodOptions = MethodOptions(),
    options: TransferOptions = TransferOptions(),
) -> int:
    """Measure what a model's features are worth on other images: few-shot, linear probe, kNN, or a table of data sets.

    MODEL TRAIN_SHARDS EVAL_SHARDS --method fewshot: least squares on a few images
    of each class, in closed form, as the ViT paper and big_vision. probe: logistic
    regression on all of TRAIN_SHARDS. knn: votes of the nearest images by cosine,
    as DINO. EVAL_SHARDS are classified. Features are kept, so the same again takes
    seconds. MODEL is anything that `shardvit predict` takes but ONNX.

    MODEL TABLE.yaml measures all data sets of a table, as VTAB does, and goes on
    after an interruption:

      method: probe    # of the sets that say none
      data_sets:
      - {name: pets, group: natural, train: SHARDS, eval: SHARDS}
      - {name: dmlab, train: SHARDS, eval: SHARDS, method: fewshot, shots: 5}

    Some examples:
        shardvit transfer runs/digits shards/pets/train shards/pets/val --method fewshot --shots 1 5 10

        shardvit transfer vit_b16.npz shards/pets/train shards/pets/val --method probe --images 1000

        shardvit transfer runs/vit_b16/pretrain vtab.yaml --images 1000
    """
    if eval_shards is None:
        _demand_table_options(source, method=method, of_method=of_method, options=options)
        options.check(model, command="transfer")
        from launch.evaluation.transfer import measure_a_table

        return measure_a_table(model, Path(source), options=options)
    if method is None:
        raise UserError("--method: give fewshot, probe or knn")
    settings = of_method.settings(method)
    options.check(model, command=method)
    from launch.evaluation.transfer import measure_one_set

    return measure_one_set(model, source, eval_shards, settings, options=options)


def _demand_table_options(
    source: str, *, method: Method | None, of_method: MethodOptions, options: TransferOptions
) -> None:
    if not source.endswith((".yaml", ".yml")):
        raise UserError(f"transfer: give EVAL_SHARDS behind {source}, or a table of data sets, TABLE.yaml")
    given = {"method": method, "name": options.name, "label": options.label, "classes": options.classes}
    for name in [*of_method.given(), *(name for name, value in given.items() if value is not None)]:
        raise UserError(f"--{name.replace('_', '-')}: {source} says it for each of its data sets: leave it out")
