"""SampleRefs -> `Batch`: read, decode and transform the samples, and handle damaged ones.

A damaged training image is replaced by another from its lane's window, chosen by a hash of (seed, epoch, sample,
attempt), with the same crop and flip: the same for any world size and after any restart. A damaged held-out image is
not counted, since each image must count once. `Batch.faults` names both.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from shardvit.data_shards.errors import CorruptSample, Fault, SampleError, UnreadableImage
from shardvit.data_shards.images.decode import USUAL_LIMIT, EncodedImage, PixelLimit, read_image
from shardvit.data_shards.images.transforms import EvalTransform, Pixels, TrainTransform
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.mixing import Mix
from shardvit.data_shards.order.sample_order import LaneStream, SampleRefs
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.vocabulary import DecoderName, OnCorrupt

# Substitutes tried for one sample. If a share c of samples is damaged, all fail with probability c**16: never, unless
# the whole shard is lost, and then the run must stop.
_MOST_ATTEMPTS = 16
PADDING = -1  # fills label rows of samples with fewer labels than others

_Transform = Callable[[EncodedImage, Pixels], None]  # image, row to fill


@dataclass(frozen=True)
class Access:
    """Settings for reading samples, shared by training and evaluation."""

    shards: ShardSet
    store: Store | None = None  # None: every shard is a local file
    decoder: DecoderName = "auto"
    pixel_limit: PixelLimit = USUAL_LIMIT
    on_corrupt: OnCorrupt = "stop"


class _Rows:
    def __init__(self, refs: SampleRefs, *, image_size: int) -> None:
        count = len(refs.sample)
        self.images = _empty_images(count, image_size)
        self.pixels: Pixels = self.images.numpy()
        self.labels: list[tuple[int, ...]] = [(0,)] * count
        self.keys = [""] * count
        self.samples: list[int] = refs.sample.tolist()
        self.mirrored, self.counted, self.substituted = [False] * count, [True] * count, [False] * count
        self.faults: list[Fault] = []

    def batch(self, *, epochs: NDArray[np.int64], is_multi_label: bool, mix: Mix | None = None) -> Batch:
        return Batch(
            images=self.images,
            mirrored=torch.tensor(self.mirrored, dtype=torch.bool),
            labels=_label_tensor(self.labels, is_multi_label=is_multi_label),
            counted=torch.tensor(self.counted, dtype=torch.bool),
            substituted=torch.tensor(self.substituted, dtype=torch.bool),
            samples=torch.tensor(self.samples, dtype=torch.int64),
            epochs=torch.tensor(epochs, dtype=torch.int64),
            keys=tuple(self.keys),
            faults=tuple(self.faults),
            mix=mix,
        )


class Assembler:
    """Make batches of one data set. Picklable and thread-safe."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._is_multi_label = access.shards.is_multi_label
        self._of_thread = threading.local()  # each reader keeps its own shards open

    def __reduce__(self) -> tuple[object, ...]:
        return Assembler, (self._access,)

    @property
    def _reader(self) -> ShardReader:
        if not hasattr(self._of_thread, "reader"):
            self._of_thread.reader = ShardReader(self._access.shards, store=self._access.store)
        return self._of_thread.reader

    def train(
        self,
        refs: SampleRefs,
        *,
        order: LaneStream,
        transform: TrainTransform,
        draws: NDArray[np.float64],
        mix: Mix | None = None,
    ) -> Batch:
        """Make a training batch of these samples or their substitutes; `draws` has a row for each.

        With `mix` the last row is only mixed into the one before. SampleError for damage that is not substituted.
        """
        rows = _Rows(refs, image_size=transform.image_size)
        for slot, (shard, row) in enumerate(zip(refs.shard.tolist(), refs.row.tolist(), strict=True)):

            def crop(image: EncodedImage, into: Pixels, slot: int = slot) -> None:
                rows.mirrored[slot] = transform(image, draws=draws[slot], into=into)[1]

            if not self._fill(rows, slot, shard=shard, row=row, transform=crop):
                self._substitute(rows, slot, refs, order=order, transform=crop)
        return rows.batch(epochs=refs.epoch, is_multi_label=self._is_multi_label, mix=mix)

    def _substitute(
        self, rows: _Rows, slot: int, refs: SampleRefs, *, order: LaneStream, transform: _Transform
    ) -> None:
        first, wanted = rows.faults[-1], refs.part(slice(slot, slot + 1))
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            other = order.substitute(wanted, attempt=attempt)
            if self._fill(rows, slot, shard=int(other.shard[0]), row=int(other.row[0]), transform=transform):
                rows.samples[slot], rows.substituted[slot] = int(other.sample[0]), True
                return
        raise SampleError(
            f"sample {first.key!r} of {first.shard} is damaged ({first.reason}), and so are the {_MOST_ATTEMPTS} "
            "substitutes that were tried: run `shardvit check` on these shards, and restore whole copies"
        )

    def evaluate(self, refs: SampleRefs, *, counted: NDArray[np.bool_], transform: EvalTransform) -> Batch:
        """Make a held-out batch, without counting padding and damaged images; SampleError if no damage is allowed."""
        rows = _Rows(refs, image_size=transform.image_size)

        def centre(image: EncodedImage, into: Pixels) -> None:
            transform(image, into=into)

        for slot, (shard, row) in enumerate(zip(refs.shard.tolist(), refs.row.tolist(), strict=True)):
            is_whole = self._fill(rows, slot, shard=shard, row=row, transform=centre)
            if not is_whole:
                rows.keys[slot] = rows.faults[-1].key
                rows.pixels[slot] = 0
            rows.counted[slot] = is_whole and bool(counted[slot])
        return rows.batch(epochs=refs.epoch, is_multi_label=self._is_multi_label)

    def describe(self, shard: int, *, row: int) -> str:
        return self._reader.describe(shard, row=row)

    def _fill(self, rows: _Rows, slot: int, *, shard: int, row: int, transform: _Transform) -> bool:
        """Read and transform one sample into a row; False, with a fault in `rows`, if it is damaged."""
        _note(shard, row)
        access = self._access
        try:
            raw = self._reader.read(shard, row=row)
            try:
                image = read_image(raw.image, decoder=access.decoder, limit=access.pixel_limit)
                transform(image, rows.pixels[slot])
            except UnreadableImage as error:
                name = access.shards.shards[shard].name
                raise CorruptSample(name, key=raw.key, reason=str(error)) from error
        except CorruptSample as corrupt:
            if access.on_corrupt == "stop":
                raise SampleError(
                    f"{corrupt}; repair the shard (`shardvit check` finds all such samples), or set "
                    "data.max_corrupt_share above 0 to train on with another sample in its place"
                ) from corrupt
            rows.faults.append(Fault(shard=corrupt.shard, key=corrupt.key, reason=corrupt.reason))
            return False
        rows.keys[slot], rows.labels[slot] = raw.key, raw.labels
        return True


def _empty_images(count: int, size: int) -> torch.Tensor:
    """Allocate uint8 [count, size, size, 3], in shared memory in a worker process."""
    shape = (count, size, size, 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(math.prod(shape))).view(shape)


def _note(shard: int, row: int) -> None:
    """Note the next sample in a worker process, so that a report of its death can name it."""
    info = get_worker_info()
    if info is not None and (notes := getattr(info.dataset, "notes", None)) is not None:  # of `workers`
        notes[2 * info.id : 2 * info.id + 2] = shard, row


def _label_tensor(labels: list[tuple[int, ...]], *, is_multi_label: bool) -> torch.Tensor:
    """int64 [n], or [n, most labels of a sample] padded with `PADDING`."""
    if not is_multi_label:
        return torch.tensor([label for (label,) in labels], dtype=torch.int64)
    width = max(1, *(len(row) for row in labels)) if labels else 1
    return torch.tensor([[*row, *[PADDING] * (width - len(row))] for row in labels], dtype=torch.int64)
