"""The recipe's keys about data: which shards, how they are read, how images are augmented."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from data_shards.shards.location import redacted
from data_shards.vocabulary import (
    MOST_PIXELS,
    USUAL_MOST_PIXELS,
    Antialias,
    CropInterpolation,
    CropLaw,
    DecoderName,
    LabelKind,
    PartName,
    RandAugmentRanges,
    WorkerKind,
)
from pipeline.recipe.duration import BytesText, DurationText, Strict
from pipeline.recipe.vocabulary import FeatureLayer

# A tenth of the work on a photograph is Python; with more threads they, and the training loop, wait for one another.
_MOST_THREADS = 4
MOST_SIDE = 2**14  # pixels


class ShardsConfig(Strict):
    """One set of shards; where only `shards` is needed, the text alone will do."""

    shards: str = Field(min_length=1)
    """A folder or URL with a manifest, or of tars (`folder/`, `s3://bucket/train-{000..127}.tar`, `pipe:COMMAND`).
    A command is written into the run folder and MLflow as it is: name secrets in it by `$VARIABLE`."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the training images that come from this set, relative to the others; default: its size."""
    label: str | None = None
    """Tars without a manifest: cls, txt or json:KEY, the member (and key) that holds the label."""
    kind: LabelKind = "single"
    """Tars without a manifest: one label an image, or a list."""
    classes: str | None = None
    """Tars without a manifest: a file with the classes' names; default: the labels that are found."""
    part: PartName | None = None
    """held_out: a random part of the set, always the same; rest: all other images; default: all."""
    hold_out: float | None = Field(default=None, gt=0, lt=1)
    """Share of the set's images that `part` holds out; the paper's 0.01 for ImageNet, 0.02 for CIFAR."""

    @model_validator(mode="after")
    def _part_of_a_share(self) -> ShardsConfig:
        if self.part and self.hold_out is None:
            raise ValueError(f"part {self.part} of which share? Give hold_out, too, such as hold_out: 0.01")
        if self.hold_out is not None and not self.part:
            raise ValueError("hold_out means nothing without part: give part: held_out or part: rest, too")
        return self

    @field_validator("shards")
    @classmethod
    def _no_secrets(cls, shards: str) -> str:
        if not shards.startswith("pipe:") and redacted(shards) != shards:
            raise ValueError(
                f"{redacted(shards)} was given with a password or a query string, which would be written into the run "
                "folder and MLflow: leave it out, and give credentials in the environment, ~/.netrc or ~/.aws"
            )
        return shards

    @property
    def is_plain(self) -> bool:
        return self == ShardsConfig(shards=self.shards)


def _one(value: Any) -> Any:
    return {"shards": value} if isinstance(value, str) else value


def several(value: Any) -> list[Any]:
    """The mappings of one set or of a list of them, each of which may be its text alone."""
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
    """Cache of shards that are not local files, shared by the processes of a node."""

    folder: str | None = None
    """Default: shardvit-cache-USER in the folder for temporary files ($TMPDIR or /tmp)."""
    limit: BytesText = "100 GB"
    """Beyond this the least recently used shards are removed."""


MOST_LANES = 2**16


class DataConfig(Strict):
    """Order and reading of the training stream."""

    lanes: Annotated[int, Field(ge=1, le=MOST_LANES)] | Literal["auto"] = "auto"
    """Spans of an epoch; divides the global batch; the processes divide it. auto: the largest divisor up to 256, for
    more than 256 processes up to 4,096."""
    shuffle_window_images: int = Field(default=16384, ge=1, le=2**31)
    """Images of a lane that are shuffled among themselves."""
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Workers of a rank that read and decode ahead. auto: on a GPU as many as it needs and this rank's cores allow,
    measured by decoding a few images at the start; on a CPU none, since its cores train."""
    worker_kind: WorkerKind | Literal["auto"] = "auto"
    """Threads or processes; the samples are the same. auto: threads up to 4, which start faster and share memory."""
    max_corrupt_share: float = Field(default=0.001, ge=0, le=1)
    """Share of a set's images that may turn out damaged (others are trained on instead); above it the run stops."""
    max_image_pixels: int = Field(default=USUAL_MOST_PIXELS, ge=1, le=MOST_PIXELS)
    """Images of more pixels count as damaged, and are not decoded: it takes up to 17 bytes a pixel, in each worker."""
    decoder: DecoderName = "auto"
    """auto: nvImageCodec on the CPU where it is installed, which decodes only the crop; gpu: its GPU engine."""
    cache: CacheRecipe = CacheRecipe()

    def kind_of_workers(self, count: int) -> WorkerKind:
        """`worker_kind`, with auto decided for so many."""
        if self.worker_kind == "auto":
            return "thread" if count <= _MOST_THREADS else "process"
        return self.worker_kind


class RandAugmentConfig(Strict):
    """RandAugment(n, m): n operations of strength m on each image (arXiv 1909.13719; timm's operations)."""

    num_ops: int = Field(default=2, ge=1, le=10)
    magnitude: int = Field(ge=0, le=30)
    ranges: RandAugmentRanges = "timm"
    """Scale of the magnitude. big_vision: Google's, with shifts in pixels, cutout and its solarize."""


class AugmentConfig(Strict):
    """The random crop and flip, and stronger augmentation, off by default.

    Google's pre-training: `crop: google` and `antialias: none`, in big_vision `cast`; its fine-tuning on small sets:
    `crop: resize_and_crop`, `resize_size: 448` and `interpolation: area`.
    """

    crop: CropLaw = "torchvision"
    """The random-resized crop by torchvision's law or Google's, whose crops are smaller; resize_and_crop: the short
    side to resize_size, then a square of image_size anywhere (big_vision's fine-tuning)."""
    crop_area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest share of the image's area in a crop."""
    crop_ratio: tuple[float, float] | None = None
    """Smallest and largest width/height of a crop; default 3/4 to 4/3 (torchvision), 0.75 to 1.33 (google)."""
    resize_size: int | None = Field(default=None, gt=0, le=MOST_SIDE)
    """Pixels of the short side before crop resize_and_crop takes its square; Google has 448 for 384."""
    interpolation: CropInterpolation = "bilinear"
    """Interpolation of the resize. area: big_vision's average over the area that a pixel covers."""
    antialias: Antialias = "antialiased"
    """Antialiasing of a bilinear resize; none: as Google's code; cast: also cut off the fraction of a level, as
    big_vision does."""
    flip: float = Field(default=0.5, ge=0, le=1)
    """Share of the images mirrored; 0 where left and right have a meaning."""
    rand_augment: RandAugmentConfig | None = None
    mixup_alpha: float = Field(default=0.0, ge=0)
    """Beta(alpha, alpha) of mixup; 0 does not mix. The law is big_vision's: it pairs an image with the one before it
    on the device, this with the one after it in the global batch."""
    cutmix_alpha: float = Field(default=0.0, ge=0)
    """Beta(alpha, alpha) of CutMix; 0 does not paste."""
    cutmix_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the batches that get CutMix, where both are on."""

    @property
    def ratio(self) -> tuple[float, float]:
        """`crop_ratio`, or the law's own; Google's code leaves TensorFlow's default, which ends at 1.33, not at 4/3."""
        return self.crop_ratio or ((0.75, 1.33) if self.crop == "google" else (3 / 4, 4 / 3))

    @model_validator(mode="after")
    def _crop_fits(self) -> AugmentConfig:
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise ValueError("crop_area must be two shares in ascending order, above 0 and at most 1")
        if self.crop_ratio is not None and not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError("crop_ratio must be two positive numbers in ascending order")
        if self.crop == "resize_and_crop":
            self.refuse("crop_area", "crop_ratio", means_nothing="to crop resize_and_crop")
            if self.resize_size is None:
                raise ValueError("crop resize_and_crop needs resize_size: give pixels, such as 448 for image_size 384")
        else:
            self.refuse("resize_size", means_nothing=f"to crop {self.crop}")
        if self.interpolation != "bilinear":
            self.refuse("antialias", means_nothing=f"to interpolation {self.interpolation}")
        return self

    @model_validator(mode="after")
    def _mixing_fits(self) -> AugmentConfig:
        if self.cutmix_share != 0.5 and not (self.mixup_alpha and self.cutmix_alpha):
            raise ValueError("cutmix_share chooses between mixup and CutMix: set both alphas, or leave it out")
        return self


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
"""One number from 1 on, or a list of different ones."""
Strengths = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1e30)], ...], BeforeValidator(_all), AfterValidator(_distinct)
]
"""One number above 0, or a list of different ones."""


class FewShotConfig(Strict):
    """A data set on which few-shot accuracy is measured while a model is pre-trained, as the ViT paper's figure 4 does:
    least squares in closed form on the features of a few images of each class (big_vision's `fewshot_lsr`)."""

    name: str
    """Part of the metric's name: val/fewshot_NAME_5shot."""
    train: OneSet
    """Shards to draw the shots from; only the drawn images are read."""
    eval: OneSet
    """Shards to classify."""
    shots: Counts = (5,)
    """Images of each class: one number or a list."""
    seeds: int = Field(default=3, ge=1, le=1000)
    """Number of draws; the metric is their mean."""
    l2: float = Field(default=1024.0, gt=0, le=1e30)
    """Strength of the regularisation; big_vision's is 2^10."""
    layer: FeatureLayer = "pre_logits"
    """pre_logits: what the last linear layer is given, as big_vision; pooled: the trunk's pooled output."""
    every: DurationText | None = None
    """At the first evaluation (eval_every) after each multiple of this, and at the end; 0: at the end alone; null: at
    each evaluation."""
    keep_decoded: BytesText = "1 GB"
    """Memory of a process for decoded images; the rest is read and decoded each time."""

    @field_validator("name")
    @classmethod
    def _name_in_a_metric(cls, name: str) -> str:
        if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_-]{0,59}", name):
            raise ValueError(f"{name[:60]!r} is part of a metric's name: give up to 60 letters, digits, '_' and '-'")
        return name

    @model_validator(mode="after")
    def _sets_alone(self) -> FewShotConfig:
        if self.train.weight is not None or self.eval.weight is not None:
            raise ValueError("a weight means nothing to a single set of shards: leave it out")
        return self
