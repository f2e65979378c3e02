"""SampleRefs -> `Batch`: read, decode and transform the samples, and handle damaged ones.

A damaged training image is replaced by another from its lane's window, chosen by a hash of (seed, epoch, sample,
attempt), with the same crop and flip: the same for any world size and after any restart. A damaged held-out image is
not counted, since each image must count once. `Batch.faults` names both.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from shardvit.data_shards.errors import CorruptSample, Fault, SampleError, UnreadableImage, UserError
from shardvit.data_shards.images.channels import open_image
from shardvit.data_shards.images.crops import Box, Pixels
from shardvit.data_shards.images.decode import USUAL_LIMIT, EncodedImage, PixelLimit, decode_together
from shardvit.data_shards.images.transforms import EvalTransform, TrainTransform
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.memory import TOGETHER
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

_MOST_PIXELS_TOGETHER = 1 << 22  # bounds the memory: 12 MB, and an image with more is decoded with those before it


class _Begun(NamedTuple):  # 2 µs faster to make than a frozen dataclass
    """A sample that is read and not decoded yet, or what is wrong with it, told when its turn comes."""

    slot: int
    sample: tuple[int, int]  # shard and row
    key: str
    labels: tuple[int, ...] = ()
    wanted: tuple[EncodedImage, Box] | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Access:
    """Settings for reading samples, shared by training and evaluation."""

    shards: ShardSet
    store: Store | None = None  # None: every shard is a local file
    decoder: DecoderName = "auto"
    pixel_limit: PixelLimit = USUAL_LIMIT
    on_corrupt: OnCorrupt = "stop"
    channels: int = 0  # read as they are (`images.channels`); 0: as colours


class _Rows:
    """A batch being assembled and its transform; `draws` holds each slot's random numbers."""

    def __init__(
        self, refs: SampleRefs, *, transform: TrainTransform | EvalTransform, draws: Any, channels: int = 0
    ) -> None:
        count = len(refs.sample)
        self.transform, self.draws = transform, draws
        self.images = _empty_images(count, transform.image_size, channels=channels)
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
        rows = _Rows(refs, transform=transform, draws=draws, channels=self._access.channels)
        rows.mirrored = transform.mirrors(draws).tolist()
        for slot, is_whole in self._fill(rows, refs):
            if not is_whole:
                self._substitute(rows, slot, refs, order=order)
        return rows.batch(epochs=refs.epoch, is_multi_label=self._is_multi_label, mix=mix)

    def _substitute(self, rows: _Rows, slot: int, refs: SampleRefs, *, order: LaneStream) -> None:
        first, wanted = rows.faults[-1], refs.part(slice(slot, slot + 1))
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            other = order.substitute(wanted, attempt=attempt)
            if all(is_whole for _, is_whole in self._fill(rows, other, first=slot)):
                rows.samples[slot], rows.substituted[slot] = int(other.sample[0]), True
                return
        raise SampleError(
            f"sample {first.key!r} of {first.shard} is damaged ({first.reason}), and so are the {_MOST_ATTEMPTS} "
            "substitutes that were tried: run `shardvit check` on these shards, and restore whole copies"
        )

    def evaluate(self, refs: SampleRefs, *, counted: NDArray[np.bool_], transform: EvalTransform) -> Batch:
        """Make a held-out batch, without counting padding and damaged images; SampleError if no damage is allowed."""
        rows = _Rows(refs, transform=transform, draws=[None] * len(counted), channels=self._access.channels)
        for slot, is_whole in self._fill(rows, refs):
            if not is_whole:
                rows.keys[slot] = rows.faults[-1].key
                rows.pixels[slot] = 0
            rows.counted[slot] = is_whole and bool(counted[slot])
        return rows.batch(epochs=refs.epoch, is_multi_label=self._is_multi_label)

    def describe(self, shard: int, *, row: int) -> str:
        return self._reader.describe(shard, row=row)

    def _fill(self, rows: _Rows, refs: SampleRefs, *, first: int = 0) -> Iterator[tuple[int, bool]]:
        """Read and transform samples into the slots from `first` on.

        Yields each slot in turn, once it is filled, and whether the sample is whole; if not, with a fault in `rows`.
        """
        begun: list[_Begun] = []
        pixels = 0
        for slot, sample in enumerate(zip(refs.shard.tolist(), refs.row.tolist(), strict=True), start=first):
            begun.append(each := self._begin(rows, slot, sample))
            if each.wanted is not None:
                pixels += each.wanted[1].height * each.wanted[1].width
            if len(begun) == TOGETHER or pixels > _MOST_PIXELS_TOGETHER:
                yield from self._finish(rows, begun)
                begun, pixels = [], 0
        if begun:
            yield from self._finish(rows, begun)

    def _begin(self, rows: _Rows, slot: int, sample: tuple[int, int]) -> _Begun:
        access, key = self._access, ""
        _note([sample])
        try:
            raw = self._reader.read(sample[0], row=sample[1])
            key = raw.key
            image = open_image(raw.image, channels=access.channels, decoder=access.decoder, limit=access.pixel_limit)
            box = rows.transform.box(image.height, image.width, draws=rows.draws[slot])
            return _Begun(slot, sample, key, raw.labels, (image, box))
        except (UserError, CorruptSample, UnreadableImage) as error:
            return _Begun(slot, sample, key, error=error)

    def _finish(self, rows: _Rows, begun: Sequence[_Begun]) -> Iterator[tuple[int, bool]]:
        _note([each.sample for each in begun])
        decoded = iter(decode_together([each.wanted for each in begun if each.wanted is not None]))
        for each in begun:
            _note([each.sample])
            yield each.slot, self._finish_one(rows, each, each.wanted and next(decoded))

    def _finish_one(self, rows: _Rows, begun: _Begun, pixels: Pixels | None) -> bool:
        slot = begun.slot
        try:
            try:
                if begun.error is not None:
                    raise begun.error
                assert begun.wanted is not None
                image, box = begun.wanted
                pixels = image.pixels(box) if pixels is None else pixels
                rows.transform.finish(pixels, draws=rows.draws[slot], into=rows.pixels[slot])
            except UnreadableImage as error:
                name = self._access.shards.shards[begun.sample[0]].name
                raise CorruptSample(name, key=begun.key, reason=str(error)) from error
        except CorruptSample as corrupt:
            if self._access.on_corrupt == "stop":
                raise SampleError(
                    f"{corrupt}; repair the shard (`shardvit check` finds all such samples), or set "
                    "data.max_corrupt_share above 0 to train on with another sample in its place"
                ) from corrupt
            rows.faults.append(Fault(shard=corrupt.shard, key=corrupt.key, reason=corrupt.reason))
            return False
        rows.keys[slot], rows.labels[slot] = begun.key, begun.labels
        return True


def _empty_images(count: int, size: int, *, channels: int) -> torch.Tensor:
    """Allocate uint8 [count, size, size, 3] or float32 [..., channels], in shared memory in a worker process."""
    shape, dtype = (count, size, size, channels or 3), torch.float32 if channels else torch.uint8
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(torch.UntypedStorage._new_shared(num_bytes)).view(shape)


def _note(samples: Sequence[tuple[int, int]]) -> None:
    """Note the next sample, or those to be decoded together, in a worker process: a report of its death names them."""
    info = get_worker_info()
    if info is not None and (notes := getattr(info.dataset, "notes", None)) is not None:  # of `workers`
        numbers = [number for sample in samples for number in sample]
        if len(samples) < TOGETHER:
            numbers.append(-1)  # ends them
        start = 2 * TOGETHER * info.id
        notes[start : start + len(numbers)] = numbers


def _label_tensor(labels: list[tuple[int, ...]], *, is_multi_label: bool) -> torch.Tensor:
    """int64 [n], or [n, most labels of a sample] padded with `PADDING`."""
    if not is_multi_label:
        return torch.tensor([label for (label,) in labels], dtype=torch.int64)
    width = max(1, *(len(row) for row in labels)) if labels else 1
    return torch.tensor([[*row, *[PADDING] * (width - len(row))] for row in labels], dtype=torch.int64)
