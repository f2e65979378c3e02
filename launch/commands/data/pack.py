"""`shardvit pack`: the command line of `data_shards.packing`."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import printable
from shardvit.data_shards.vocabulary import USUAL_MOST_PIXELS, LabelKind
from shardvit.launch.flags import (
    EngineOptions,
    MaxImagePixels,
    demand_counts,
    pixel_limit,
    size_bytes,
    switch,
)
from shardvit.launch.local.output import go_on, tell

if TYPE_CHECKING:
    from shardvit.data_shards.packing.request import Exclusion
    from shardvit.data_shards.packing.sources.label_list import LabelList
    from shardvit.data_shards.packing.sources.tars.samples import SampleOptions


_CHOSEN = "chosen"  # the manifest of --where


_EXCLUDE_HELP = "Leave out training images found in these shards (see `check`)."
OtherShards = Annotated[list[str] | None, Parameter(negative="", consume_multiple=True, help=_EXCLUDE_HELP)]


def _say(line: str) -> None:
    print(printable(line))


@Parameter(name="*")
@dataclass(frozen=True)
class PackOptions:
    """Flags of `shardvit pack`."""

    name: Annotated[str | None, Parameter(help="Data set's name, in file names too; default: OUT's.")] = None
    labels: Annotated[Path | None, Parameter(help="CSV (path,label), JSONL or parquet, not class folders.")] = None
    path_column: Annotated[str | None, Parameter(show=False)] = None
    label_column: Annotated[str | None, Parameter(help="There, as --path-column (path), or in a table.")] = None
    image_column: Annotated[str | None, Parameter(help="Bytes or paths in a table; default: the only such.")] = None
    class_names: Annotated[Path | None, Parameter(help="Names of the labels' classes 0, 1, ..., one a line.")] = None
    label: Annotated[str | None, Parameter(help="Of samples in tars: cls (default), txt, json:KEY, tar.")] = None
    label_kind: Annotated[LabelKind, Parameter(show=False)] = "single"
    val: Annotated[Path | None, Parameter(show=False)] = None
    val_labels: Annotated[Path | None, Parameter(show=False)] = None
    superclasses: Annotated[bool, Parameter(negative="", show=False)] = False
    classes: Annotated[str | None, Parameter(help="Only these, comma separated; they get labels 0, 1, ...")] = None
    keep_classes: Annotated[bool, switch("Accept a single class, or names differing in case or spaces.")] = False
    holdout: Annotated[float | None, Parameter(help="Share of each class to hold out as 'val'.")] = None
    holdout_images: Annotated[int | None, Parameter(help="Images to hold out, whatever their classes.")] = None
    holdout_list: Annotated[Path | None, Parameter(help="File of paths to hold out, one a line.")] = None
    samples_per_shard: Annotated[int | None, Parameter(help="Most images in a tar; default: 1000.")] = None
    shard_size: Annotated[str | None, Parameter(help="Bytes of a tar instead, such as 256MB, to an image.")] = None
    resize_short: Annotated[
        int | None, Parameter(help="Shrink larger short sides (--quality 90); default: as they are.")
    ] = None
    quality: Annotated[int | None, Parameter(show=False)] = None
    channels: Annotated[int | None, Parameter(help="Of every image, as in its file: TIFF, 16-bit PNG, npy.")] = None
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS
    drop_duplicates: Annotated[bool, switch("Pack only the first of equal files: train, then val, test.")] = False
    exclude_matches_of: OtherShards = None
    verify: Annotated[bool, switch("If OUT is packed, compare all bytes, not just times.")] = False
    skip_unreadable: Annotated[bool, switch("Skip and list unreadable or stray images; pass empty folders.")] = False
    seed: Annotated[int, Parameter(help="Seed of the shuffle and the held-out choice.")] = 0
    append: Annotated[bool, switch("Add the images to the set that OUT is.")] = False
    where: Annotated[str | None, Parameter(help="Of a packed SOURCE, the images of which this is true.")] = None
    manifest: Annotated[str | None, Parameter(show=False)] = None

    def arguments(self) -> list[str]:
        """Return the flags as one would type them."""
        words: list[str] = []
        for each in fields(self):
            value, flag = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if isinstance(value, list):
                words += [flag, *value]
            elif value != each.default:
                words.append(flag if value is True else f"{flag}={value}")
        return words

    def request(self) -> dict[str, Any]:
        from shardvit.data_shards.packing.image import DEFAULT_QUALITY, Resize
        from shardvit.data_shards.packing.sources.recognise import Published

        if self.resize_short is None and self.quality is not None:
            raise UserError("--quality: only reduced images are encoded again; give --resize-short too")
        quality = DEFAULT_QUALITY if self.quality is None else self.quality
        same = ("name", "holdout", "holdout_images", "holdout_list", "samples_per_shard", "seed", "channels")
        return {name: getattr(self, name) for name in same} | {
            "labels": self._label_list(),
            "samples": self._samples(),
            "classes": [each.strip() for each in self.classes.split(",")] if self.classes else None,
            "doubtful_classes": "keep" if self.keep_classes else "refuse",
            "published": Published(self.val, self.val_labels, "coarse" if self.superclasses else "fine"),
            "reread": "all" if self.verify else "changed",
            "shard_size_bytes": size_bytes("--shard-size", self.shard_size),
            "resize": None if self.resize_short is None else Resize(self.resize_short, quality),
            "pixel_limit": pixel_limit(self.max_image_pixels),
            "unreadable": "skip" if self.skip_unreadable else "refuse",
            "duplicates": "drop" if self.drop_duplicates else "keep",
            "existing": "append" if self.append else "refuse",
            "exclusion": self._exclusion(),
        }

    def _label_list(self) -> LabelList | None:
        from shardvit.data_shards.packing.sources.label_list import LabelList

        if self.labels is not None:
            columns = self.path_column or "path", self.label_column or "label"
            return LabelList(self.labels, *columns, self.class_names)
        if self.path_column is not None:
            raise UserError("--path-column: it describes --labels; give that too")
        return None

    def _samples(self) -> SampleOptions:
        from shardvit.data_shards.packing.sources.tars.samples import SampleOptions

        of_list = self.labels is not None
        names, column = (None, None) if of_list else (self.class_names, self.label_column)
        return SampleOptions(self.label, self.label_kind, names, self.where, self.image_column, column)

    def _exclusion(self) -> Exclusion | None:
        from shardvit.data_shards.packing.request import Exclusion
        from shardvit.data_shards.reading.opening import open_all_splits
        from shardvit.data_shards.shards.location import is_local
        from shardvit.data_shards.store.cache import CacheConfig
        from shardvit.data_shards.store.store import Store
        from shardvit.launch.pages.duplicates_page import write_duplicates

        sets = self.exclude_matches_of
        if sets is None:
            return None
        if not sets:
            raise UserError("--exclude-matches-of: no shards follow it; name the sets whose images are left out")
        # typed by the user, so commands may run
        store = Store(None if all(map(is_local, sets)) else CacheConfig(), commands="run")
        opened = tuple(open_all_splits(sets, store=store, report=_say))
        return Exclusion(opened, store, partial(write_duplicates, command="pack"))


@Parameter(name="*")
@dataclass(frozen=True)
class ForecastOptions:
    """Flags of `shardvit pack --dry-run`."""

    dry_run: Annotated[bool, switch("Say what it would take, by a trial of 64 images; write nothing.")] = False
    price: Annotated[str | None, Parameter(show=False)] = None
    bandwidth: Annotated[str | None, Parameter(show=False)] = None
    as_json_text: Annotated[bool, Parameter(name="--json", negative="", show=False)] = False


@Parameter(name="*", show=False)
@dataclass(frozen=True)
class StepOptions:
    """Flags of the jobs of `shardvit submit --pack`, or of any other scheduler's."""

    step: Literal["plan", "shards", "finish"] | None = None
    task: int | None = None
    of: int | None = None

    def chosen(self) -> dict[str, Any]:
        """Return `pack`'s arguments."""
        if (self.step == "shards") != (self.task is not None) or (self.task is None) != (self.of is None):
            raise UserError("--task, --of: they are for --step shards, which makes the shards TASK, TASK + OF, ...")
        return {name: value for name, value in vars(self).items() if value is not None}


def pack(
    source: str,
    out: str | None = None,
    /,
    *,
    options: PackOptions = PackOptions(),
    forecast: ForecastOptions = ForecastOptions(),
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    steps: StepOptions = StepOptions(),
) -> int:
    """Pack images into WebDataset shards with a manifest.

    SOURCE: a folder or tar of class folders (or of train/, val/, test/ with them), any folder with
    --labels, tars of samples, parquet or Arrow tables, patterns and URLs of all these, a packed set,
    hf://datasets/OWNER/NAME, "digits" (scikit-learn's), or ImageNet, CIFAR, MNIST, Pets, Flowers or
    VTAB as published. Unreadable images stop it. Interrupted, run it again: the result is the same.
    Also --val, --superclasses, --label-kind, --manifest, --price: docs/your-data.md, docs/corpus.md.

    Some examples:
        shardvit pack photos/ shards/photos --holdout 0.1
        shardvit pack "s3://raw/{00000..09999}.tar" shards/raw --label json:class
        shardvit pack shards/photos --where "width >= 128 and not duplicate"
    """
    from shardvit.data_shards.checking.near_duplicates.fingerprint import kept_places
    from shardvit.data_shards.packing.pack import pack as pack_images
    from shardvit.data_shards.shards.location import is_local, local_path
    from shardvit.launch.local.processes import handled

    if not forecast.dry_run and forecast != ForecastOptions():
        raise UserError("--price, --bandwidth, --json: they are for --dry-run; give that too")
    step = steps.chosen()
    go_on()
    if out is None:
        if (forecast, engine, steps) != (ForecastOptions(), EngineOptions(), StepOptions()):
            raise UserError("--dry-run, --engine, --workers, --address, --step: they are for packing; name OUT, too")
        return _choose(source, options)
    if options.manifest is not None:
        raise UserError("--manifest: it names what --where writes without OUT; leave one of them out")
    if forecast.dry_run:
        if engine.engine == "ray" or engine.address or step:
            raise UserError("--dry-run: give it a cluster's CPUs as --workers, without --engine, --address and --step")
        demand_counts(workers=engine.workers)
        return _foresee(source, out, options, forecast, engine.workers)
    beside = str(local_path(out).absolute().parent) if is_local(out) else out
    interrupting = handled((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)
    with engine.open(source, beside, *kept_places(options.exclude_matches_of)) as opened, interrupting:
        pack_images(source, out, engine=opened, report=_say, **options.request(), **step)
    return 0


def _foresee(source: str, out: str, options: PackOptions, asked: ForecastOptions, workers: int | None) -> int:
    from shardvit.data_shards.packing.forecast.cost import parse_bandwidth, parse_prices
    from shardvit.data_shards.packing.forecast.trial import forecast
    from shardvit.data_shards.packing.pack import list_source
    from shardvit.data_shards.packing.work import unpacked_path
    from shardvit.data_shards.processes import num_cores

    prices, bandwidth = parse_prices(asked.price), parse_bandwidth(asked.bandwidth)  # before an hour of listing
    listed, request = list_source(source, out, report=tell, **options.request())
    cost = forecast(listed, request, out, workers=workers or num_cores(), bytes_per_second=bandwidth, prices=prices)
    print(json.dumps(cost.as_json(), indent=1) if asked.as_json_text else printable("\n".join(cost.lines())))
    if (kept := unpacked_path(out)).is_dir():
        tell(f"{kept}: what listing had to decompress or copy stays for the packing; delete it if none follows")
    return 0


def _choose(source: str, options: PackOptions) -> int:
    from shardvit.data_shards.sets.selection import write_choice

    if options.where is None:
        raise UserError("OUT: name the folder that the shards go into")
    if replace(options, where=None, manifest=None) != PackOptions():
        raise UserError("--where without OUT writes manifests of the shards there are: the other flags need OUT")
    write_choice(source, options.where, name=options.manifest or _CHOSEN, report=_say)
    return 0
