"""Shards for a training loop of one's own: the batches of `shardvit run`, in its exact order.

Order, crops and mixing are functions of (seed, position), the same for any number of processes and workers, and the
position is one number. Batches are read ahead; a batch of 256 images of 224 px is 154 MB of float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.mixture import make_order
from shardvit.data_shards.order.sample_order import MOST_IMAGES, check_world_size
from shardvit.data_shards.reading.opening import open_shards as open_set
from shardvit.data_shards.shards.location import is_local
from shardvit.data_shards.shards.shard_set import Damaged, Portion, Report, ShardSet, ShardsSpec
from shardvit.data_shards.store.cache import CacheConfig, default_cache_folder
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import parse_bytes
from shardvit.data_shards.vocabulary import (
    GOOGLES,
    DecoderName,
    EvalProtocol,
    LabelKind,
    Normalisation,
    OnCorrupt,
    PartName,
    WorkerKind,
)
from shardvit.launch.api.options import PathLike
from shardvit.pipeline.recipe.data import DataConfig
from shardvit.pipeline.recipe.duration import in_steps, parse_duration
from shardvit.pipeline.recipe.mistakes import mistakes
from shardvit.pipeline.recipe.schema import lanes_of
from shardvit.pipeline.recipe.stages.augment import AugmentConfig

if TYPE_CHECKING:
    import torch

    from shardvit.data_shards.loading.batch import Batch
    from shardvit.data_shards.loading.loader import EvalBatches, TrainBatches

Use = Literal["train", "evaluate"]


class LoadedBatch(NamedTuple):
    """One process's part of a batch."""

    images: torch.Tensor  # float32 [B, 3, S, S], normalised
    targets: torch.Tensor  # int64 [B]; with several labels or mixing float32 [B, classes]
    ids: torch.Tensor  # int64 [B]: the samples' numbers in the set, from 0


@dataclass(frozen=True)
class OpenedShards(ShardSet):
    """A set of shards: `num_samples`, `classes`, `shards`, `digest`, ..., and batches of it."""

    store: Store | None = None  # of remote shards

    def loader(
        self,
        *,
        batch_size: int,
        image_size: int,
        world_size: int = 1,
        rank: int = 0,
        resume_at: int = 0,
        use: Use = "train",
        duration: str | None = None,
        seed: int = 0,
        augment: Mapping[str, Any] | None = None,
        protocol: EvalProtocol = "vit",
        crop_share: float | None = None,
        mean: tuple[float, ...] = GOOGLES.mean,
        std: tuple[float, ...] = GOOGLES.std,
        lanes: int | Literal["auto"] = "auto",
        shuffle_window_images: int = DataConfig().shuffle_window_images,
        workers: int = 4,
        worker_kind: WorkerKind = "thread",
        decoder: DecoderName = "auto",
        on_corrupt: OnCorrupt = "stop",
        device: torch.device | str = "cpu",
    ) -> ShardLoader:
        """Load batches, in an order that depends on neither processes nor workers.

        For training, an epoch is a permutation of all samples, epochs follow one another without a gap, and crops,
        flips and mixing are functions of (seed, epoch, sample). For evaluation each readable sample comes exactly once
        over all processes; a last batch may be shorter, and a process may have fewer batches than another.

        Args:
            batch_size: images of a step, over all processes; each gets `batch_size / world_size`.
            image_size: side of the square, in pixels.
            world_size: number of processes; in training it must divide the lanes.
            rank: which of them this is.
            resume_at: images seen so far, as the `images_seen` of an earlier loader; a multiple of `batch_size`.
            use: "train" or "evaluate".
            duration: such as "3 epochs" or "400 steps", from the beginning, not from `resume_at`; None: no end.
            seed: of order and augmentation.
            augment: keys of a recipe's `augment`, such as `{"mixup_alpha": 0.2}`; None: random crop and flip.
            protocol: resizing and cropping in evaluation.
            crop_share: in evaluation, the crop's side over the resized short side.
            mean: of each channel, subtracted from pixels in [0, 1].
            std: by which they are then divided.
            lanes: spans of the order, as a recipe's `data.lanes`.
            shuffle_window_images: as a recipe's.
            workers: that read and decode ahead; 0: none.
            worker_kind: "thread"; "process" needs an `if __name__ == "__main__"` in the script.
            decoder: of JPEGs.
            on_corrupt: "stop" (SampleError), or "substitute" another sample by a fixed rule (in evaluation: leave out).
            device: where the batches are wanted; on a GPU they are copied one ahead.

        Returns:
            An iterable of batches (images, targets, ids), which counts `images_seen`.

        Raises:
            UserError: sizes that do not fit one another, naming those that do.

        Example:
            for images, targets, ids in shards.loader(batch_size=64, image_size=32, duration="1 epochs"):
                ...
        """
        if batch_size < 1 or resume_at < 0 or resume_at % batch_size:
            raise UserError(f"resume_at {resume_at}, batch_size {batch_size}: give a multiple of the batch, from 0")
        if use == "evaluate" and (resume_at or duration or augment):
            raise UserError("resume_at, duration, augment: an evaluation is one whole pass: leave them out")
        for name, given in (("mean", mean), ("std", std)):
            if len(given) != (wanted := self.channels or 3):
                raise UserError(f"{name} has {len(given)} numbers: give {wanted}, one for each channel")
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank}: give 0 to {world_size - 1}, below world_size")

        import torch

        from shardvit.data_shards.images.transforms import EvalTransform
        from shardvit.data_shards.loading.assemble import Access
        from shardvit.data_shards.loading.loader import EvalBatches, Layout, TrainBatches
        from shardvit.pipeline.stage.batches import OwnAugment, erasing, mixup, train_transform

        access = Access(self, store=self.store, decoder=decoder, on_corrupt=on_corrupt, channels=self.channels)
        here = max(1, batch_size // world_size)
        normalisation = Normalisation(mean=mean, std=std)
        if use == "evaluate":
            transform = EvalTransform(image_size, protocol=protocol, crop_share=crop_share)
            stream = EvalBatches(access, transform=transform, rank=rank, world_size=world_size, batch_size=here)
        else:
            config: Any = SimpleNamespace(image_size=image_size, augment=_augment(augment or {}))  # as of a stage
            if self.channels and (names := config.augment.of_colours):
                raise UserError(
                    f"augment.{names[0]} is for colours of 8 bits, not {self.channels} channels: leave it out"
                )
            repeats: int = config.augment.repeats
            lanes = lanes_of(batch_size, processes=world_size, repeats=repeats) if lanes == "auto" else lanes
            check_world_size(lanes, world_size=world_size)
            custom = config.augment.custom
            stream = TrainBatches(
                access,
                order=make_order(
                    [self.shard_sizes],
                    weights=None,
                    seed=seed,
                    lanes=lanes,
                    global_batch_images=batch_size,
                    window_images=shuffle_window_images,
                    repeats=repeats,
                ),
                transform=replace(
                    train_transform(config, normalisation=normalisation), own=custom and OwnAugment(custom)
                ),
                layout=Layout(rank=rank, world_size=world_size, micro_batch_size=here, accumulation_steps=1),
                seed=seed,
                mixup=mixup(config),
                erasing=erasing(config),
            )
        steps = MOST_IMAGES // (2 * batch_size)
        if duration is not None:
            try:
                length = parse_duration(duration)
                steps = in_steps(length, global_batch_images=batch_size, samples_per_epoch=self.num_samples)
            except ValueError as error:
                raise UserError(f"duration: {error}") from None
        return ShardLoader(
            resume_at, batch_size, stream, steps, normalisation, workers, worker_kind, torch.device(device)
        )


def open_shards(
    location: PathLike,
    *,
    label: str | None = None,
    kind: LabelKind = "single",
    classes: PathLike | None = None,
    part: PartName | None = None,
    hold_out: float | None = None,
    cache: PathLike | None = None,
    cache_limit: str = "50GB",
    damaged: Damaged = "refuse",
    report: Report = print,
) -> OpenedShards:
    """Open a set of shards.

    Args:
        location: a packed folder or its URL, a folder or pattern of other tools' tars, or `pipe:COMMAND`.
        label: for tars without a manifest: "cls", "txt" or "json:KEY".
        kind: for these: "single" or "multi", labels of an image.
        classes: for these: a file of class names; None: the labels found.
        part: "held_out" or "rest" of the set, by a fixed rule; None: all of it.
        hold_out: the share of the images that `part` holds out.
        cache: folder of downloaded shards; None: shardvit-cache-USER in $TMPDIR or /tmp.
        cache_limit: its size; the least recently used are removed first.
        damaged: "refuse", or "report" in the set's `damage`.
        report: gets lines of progress.

    Returns:
        The set.

    Raises:
        UserError: nothing is there, or it is broken; StoreError if a server cannot be reached.

    Example:
        shards = shardvit.open_shards("shards/train")
    """
    place = os.fspath(location)
    store = None
    if not is_local(place):
        folder = default_cache_folder() if cache is None else Path(cache)
        store = Store(CacheConfig(folder, limit_bytes=parse_bytes(cache_limit)), commands="run")
    if (part is None) != (hold_out is None):
        raise UserError("part, hold_out: give both, or neither")
    portion = None if part is None or hold_out is None else Portion(part, hold_out=hold_out)
    names = None if classes is None else Path(classes)
    spec = ShardsSpec(place, label=label, kind=kind, classes=names, portion=portion)
    opened = open_set(spec, damaged=damaged, report=report, store=store)
    return OpenedShards(**{each.name: getattr(opened, each.name) for each in fields(ShardSet)}, store=store)


@dataclass
class ShardLoader:
    """Batches by position. Each `for` goes on where the last one ended; in evaluation it begins again.

    Attributes:
        images_seen: over all processes, in the batches that were handed out: the `resume_at` to go on from.
    """

    images_seen: int
    batch_size: int
    _stream: TrainBatches | EvalBatches
    _stop_step: int
    _normalisation: Normalisation
    _workers: int
    _kind: WorkerKind
    _device: torch.device

    def __iter__(self) -> Iterator[LoadedBatch]:
        from shardvit.data_shards.loading.device_prefetch import Batches, prefetch_to_device
        from shardvit.data_shards.loading.loader import TrainBatches, TrainLoader, eval_batches

        batches: Batches
        readers: Any = {"workers": self._workers, "kind": self._kind}
        if isinstance(self._stream, TrainBatches):
            start = self.images_seen // self.batch_size
            batches = TrainLoader(self._stream, start_step=start, stop_step=self._stop_step, **readers)
        else:
            self.images_seen = 0
            batches = eval_batches(self._stream, **readers)
        with closing(prefetch_to_device(batches, device=self._device)) as ready:
            for batch in ready:
                made = self._made(batch)
                self.images_seen += self.batch_size
                if len(made.images):
                    yield made

    def _made(self, batch: Batch) -> LoadedBatch:
        import torch

        from shardvit.pipeline.stage.pixels import model_input, targets

        shards: ShardSet = self._stream.access.shards
        images = model_input(batch, device=self._device, dtype=torch.float32, normalisation=self._normalisation)
        kind: LabelKind = "multi" if shards.is_multi_label else "single"
        wanted = targets(batch, device=self._device, num_classes=shards.num_classes, label_kind=kind)
        ids = batch.samples[: len(images)]
        if batch.counted.all():  # else padding, or an image that could not be read
            return LoadedBatch(images, wanted, ids)
        kept = batch.counted.to(self._device)
        return LoadedBatch(images[kept], wanted[kept], ids[batch.counted])


def _augment(given: Mapping[str, Any]) -> AugmentConfig:
    from pydantic import ValidationError

    try:
        return AugmentConfig.model_validate(dict(given))
    except ValidationError as error:
        found = mistakes(error, tree={**given}, root=AugmentConfig)
        raise UserError("; ".join(f"augment: {each.text}" for each in found)) from None
