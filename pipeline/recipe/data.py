"""Recipe keys for data: shards, reading, augmentation."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, field_validator

from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.vocabulary import (
    MOST_CHANNELS,
    MOST_PIXELS,
    USUAL_MOST_PIXELS,
    DecoderName,
    LabelKind,
    PartName,
    WorkerKind,
)
from shardvit.model.vocabulary import COLOUR_CHANNELS
from shardvit.pipeline.recipe.duration import BytesText, DurationText, Strict
from shardvit.pipeline.recipe.vocabulary import FeatureLayer

# A tenth of the work on an image is Python: with more threads, they and the training loop would wait for the GIL.
_MOST_THREADS = 4
MOST_SIDE = 2**14  # pixels


def without_secrets(location: str) -> str:
    """Return a location as it is. ValueError if it has a password or a query string."""
    if redacted(location) != location:
        raise ValueError(
            f"{redacted(location)} was given with a password or a query string, which the run folder and MLflow would "
            "store: leave it out, and give credentials in the environment, ~/.netrc or ~/.aws"
        )
    return location


class ShardsConfig(Strict):
    """One set of shards; a plain string means `shards` alone."""

    shards: str = Field(min_length=1)
    """A folder or URL with a manifest, or tars (`folder/`, `s3://bucket/train-{000..127}.tar`, `pipe:COMMAND`). Put a
    command's secrets in a `$VARIABLE`: the run folder and MLflow store the command verbatim."""
    weight: float | None = Field(default=None, gt=0)
    """Relative share of the training images drawn from this set; default: its size."""
    label: str | None = None
    """Tars without a manifest: the member (and key) with the label: cls, txt or json:KEY."""
    kind: LabelKind = "single"
    """Tars without a manifest: one label per image, or a list."""
    classes: str | None = None
    """Tars without a manifest: a file of class names; default: the labels found."""
    part: PartName | None = None
    """held_out: a fixed random part of the set; rest: all other images; default: all images."""
    hold_out: float | None = Field(default=None, gt=0, lt=1)
    """Share of the images that `part` holds out; the ViT paper uses 0.01 for ImageNet, 0.02 for CIFAR."""

    def problems(self) -> Iterator[str]:
        if self.part and self.hold_out is None:
            yield f"part {self.part} of which share? Give hold_out, too, such as hold_out: 0.01"
        if self.hold_out is not None and not self.part:
            yield "hold_out has no effect without part: give part: held_out or part: rest, too"

    @field_validator("shards")
    @classmethod
    def _no_secrets(cls, shards: str) -> str:
        return shards if shards.startswith("pipe:") else without_secrets(shards)

    @property
    def is_plain(self) -> bool:
        return self == ShardsConfig(shards=self.shards)


def _one(value: Any) -> Any:
    return {"shards": value} if isinstance(value, str) else value


def several(value: Any) -> list[Any]:
    """Turn one set or a list of sets (mappings or plain strings) into mappings."""
    if value == []:
        raise ValueError("the list is empty: name at least one set of shards")
    return [_one(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _short(value: ShardsConfig) -> Any:
    return value.shards if value.is_plain else value.model_dump(exclude_defaults=True)


def _all_short(value: tuple[ShardsConfig, ...]) -> Any:
    return _short(value[0]) if len(value) == 1 else [_short(each) for each in value]


OneSet = Annotated[ShardsConfig, BeforeValidator(_one), PlainSerializer(_short)]
SomeSets = Annotated[tuple[ShardsConfig, ...], BeforeValidator(several), PlainSerializer(_all_short)]


class CacheRecipe(Strict):
    """Cache of remote shards, shared by all processes of a node."""

    folder: str | None = None
    """Default: shardvit-cache-USER in $TMPDIR or /tmp."""
    limit: BytesText = "100 GB"
    """Above this size, the least recently used shards are deleted."""


MOST_LANES = 2**16


class NormalisationConfig(Strict):
    """Mean and deviation of each channel: colours from 0 to 1, integers of n channels as shares of their type's range,
    floats as they are."""

    mean: tuple[float, ...] = Field(min_length=1, max_length=MOST_CHANNELS)
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1, max_length=MOST_CHANNELS)


class DataConfig(Strict):
    """How the training stream is ordered and read."""

    lanes: Annotated[int, Field(ge=1, le=MOST_LANES)] | Literal["auto"] = "auto"
    """Spans of an epoch's order: a divisor of the global batch and a multiple of the number of processes. auto: the
    largest divisor of the batch up to 256 (4,096 with more than 256 processes)."""
    shuffle_window_images: int = Field(default=16384, ge=1, le=2**31)
    """Each lane is shuffled within windows of this size."""
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Workers per rank that read and decode ahead. auto: as many as the GPU needs (decoding speed is measured at
    startup) and the rank's cores allow; on a CPU none, since its cores train."""
    worker_kind: WorkerKind | Literal["auto"] = "auto"
    """Both give the same samples. auto: threads (faster start, shared memory) for up to 4 workers, else processes."""
    max_corrupt_share: float = Field(default=0.001, ge=0, le=1)
    """Stop the run if more than this share of a set's images is damaged; until then others replace them."""
    max_image_pixels: int = Field(default=USUAL_MOST_PIXELS, ge=1, le=MOST_PIXELS)
    """Treat larger images as damaged: decoding takes up to 17 bytes per pixel per worker."""
    decoder: DecoderName = "auto"
    """auto: nvImageCodec on the CPU (decodes only the crop) if installed; gpu: its GPU engine."""
    normalisation: Literal["google", "set"] | NormalisationConfig | None = None
    """Of pixels, from the run's first weights on. google: mean and deviation 0.5; set: those of the training images,
    from their statistics.parquet; or mean and std, a list of channels each. null: google, or set for shards packed with
    --channels and models of another number of channels; weights to start from bring theirs."""
    cache: CacheRecipe = CacheRecipe()

    def problems_with_channels(self, channels: int) -> Iterator[str]:
        if channels != COLOUR_CHANNELS:
            yield from self.ignored("decoder", why=f"with model.channels {channels}", group="data.")
        if isinstance(given := self.normalisation, NormalisationConfig):
            for name in ("mean", "std"):
                if (count := len(getattr(given, name))) != channels:
                    yield f"data.normalisation.{name} has {count} numbers: give {channels}, one for each channel"

    def kind_of_workers(self, count: int) -> WorkerKind:
        if self.worker_kind == "auto":
            return "thread" if count <= _MOST_THREADS else "process"
        return self.worker_kind


_MOST_SHOTS = 10**6


def _all(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("the list is empty: give at least one number")
    if len(set(values)) < len(values):
        raise ValueError("a number is given twice: leave one out")
    return values


Counts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=_MOST_SHOTS)], ...], BeforeValidator(_all), AfterValidator(_distinct)
]
Strengths = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1e30)], ...], BeforeValidator(_all), AfterValidator(_distinct)
]


class FewShotConfig(Strict):
    """Few-shot accuracy in pre-training (ViT paper, figure 4): closed-form least squares on features of a few images
    per class (big_vision's `fewshot_lsr`)."""

    name: str
    """Appears in the metric: val/fewshot_NAME_5shot."""
    train: OneSet
    """Shards to draw shots from; only drawn images are read."""
    eval: OneSet
    """Shards to classify."""
    shots: Counts = (5,)
    """Images per class: one number or a list."""
    seeds: int = Field(default=3, ge=1, le=1000)
    """Random draws to average over."""
    l2: float = Field(default=1024.0, gt=0, le=1e30)
    """Regularisation strength; big_vision uses 2^10."""
    layer: FeatureLayer = "pre_logits"
    """pre_logits: the input of the last linear layer, as in big_vision; pooled: the trunk's pooled output."""
    every: DurationText | None = None
    """Measure at the first evaluation (eval_every) after each multiple of this, and at the end; 0: only at the end;
    null: at every evaluation."""
    keep_decoded: BytesText = "1 GB"
    """Memory per process for decoded images; the rest is decoded each time."""

    @field_validator("name")
    @classmethod
    def _name_in_a_metric(cls, name: str) -> str:
        if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_-]{0,59}", name):
            raise ValueError(f"{name[:60]!r} is part of a metric's name: give up to 60 letters, digits, '_' and '-'")
        return name

    def problems(self) -> Iterator[str]:
        if self.train.weight is not None or self.eval.weight is not None:
            yield "a weight has no effect on a single set of shards: leave it out"
