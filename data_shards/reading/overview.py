"""Inspect a set of shards before training: labels, image sizes, and a few images drawn by a seed.

Locally it reads only labels (10 µs each) and the first kilobytes of images; in a large set, only enough shards for a
given number of labels. Remote shards are fetched whole, so only a few. Damage is named and left out. Needs no torch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import CorruptSample, Fault, SampleError, UnreadableImage, UserError
from shardvit.data_shards.images.channels import open_to_look
from shardvit.data_shards.images.crops import Pixels
from shardvit.data_shards.images.decode import USUAL_LIMIT, EncodedImage, PixelLimit, peek_size
from shardvit.data_shards.order.randomness import hash_words
from shardvit.data_shards.order.sample_order import Int64s
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.location import is_local
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.vocabulary import RandomStream

MOST_LABELS = 200_000  # read by default
MOST_SIZES = 2_000  # images to read height and width of
_MOST_FETCHED = 4  # remote shards
_HEAD_BYTES = (4096, 65_536)  # read to find an image's size; the second if the first does not tell
_LONGEST_SIDE = 512  # pixels of a drawn image
_SHARDS, _IMAGES, _SIZES, _CLASSES = range(4)  # uses of the random stream


@dataclass(frozen=True)
class DrawnImage:
    """A drawn image."""

    key: str
    shard: int  # number in the set; `row` in the shard
    row: int
    labels: tuple[int, ...]
    pixels: Pixels  # [height, width, channels], perhaps reduced
    height: int  # of the stored image
    width: int


@dataclass(frozen=True)
class Overview:
    """Labels, sizes, images and damage found in a set."""

    shards: ShardSet
    seed: int
    images_of_class: Int64s  # [classes], among the labelled; an image with several labels counts several times
    labelled: int  # images whose labels were read
    without_label: int  # among them
    opened: int  # shards
    sizes: Int64s  # [n, 3]: height, width and bytes of n images
    images: tuple[DrawnImage, ...]  # by class
    damaged: tuple[Fault, ...]
    bytes_read: int  # of the shards' samples
    shown: tuple[int, ...] = ()  # channels to show as red, green and blue, from 1; (): the first

    @property
    def is_whole(self) -> bool:
        """True if all labels were read."""
        return self.opened == len(self.shards.shards)


def inspect_shards(
    shards: ShardSet,
    *,
    store: Store | None = None,
    images: int,
    seed: int = 0,
    most_labels: int = MOST_LABELS,
    limit: PixelLimit = USUAL_LIMIT,
    shown: tuple[int, ...] = (),
) -> Overview:
    """Inspect a set and draw `images` from any shards, equally many of each class as far as there are enough; UserError
    if they lack a channel of `shown`."""
    look = _Inspection(shards, store=store, seed=seed, limit=limit)
    look.read_labels(most_labels)
    sizes, drawn = look.sizes(), look.draw(images)
    look.reader.close()
    _check_shown(shown, drawn)
    return Overview(
        shards=shards,
        seed=seed,
        images_of_class=look.images_of_class,
        labelled=len(look.places),
        without_label=sum(not labels for labels in look.labels),
        opened=look.opened,
        sizes=sizes,
        images=drawn,
        damaged=tuple(look.damaged.values()),
        bytes_read=look.bytes_read,
        shown=shown,
    )


def _check_shown(shown: tuple[int, ...], drawn: Sequence[DrawnImage]) -> None:
    for each in drawn if shown else ():
        if each.pixels.dtype == np.uint8:
            raise UserError("--channels: the images are colours, red, green and blue: leave it out")
        if max(shown) > (found := each.pixels.shape[-1]):
            raise UserError(f"--channels: there is no channel {max(shown)}: {each.key} has {found}")


class _Inspection:
    def __init__(self, shards: ShardSet, *, store: Store | None, seed: int, limit: PixelLimit) -> None:
        self.shards, self.seed, self.limit = shards, seed, limit
        self.reader = ShardReader(shards, store=store)
        self.places: list[tuple[int, int]] = []  # shard and row of each labelled image
        self.labels: list[tuple[int, ...]] = []
        self.images_of_class = np.zeros(shards.num_classes, np.int64)
        self.damaged: dict[tuple[int, int], Fault] = {}
        self.opened = self.bytes_read = 0

    def read_labels(self, most: int) -> None:
        for shard in self._chosen_shards(most):
            entry = self.shards.shards[shard]
            self.opened += 1
            try:
                for row in range(entry.num_samples):
                    try:
                        labels = self.reader.labels(shard, row=row)
                    except CorruptSample as error:
                        if entry.state == "whole":  # the set's `damage` has the rest
                            self.damaged[shard, row] = Fault(error.shard, error.key, error.reason)
                        continue
                    self.places.append((shard, row))
                    self.labels.append(labels)
                    self.bytes_read += 1024  # a header and a block
            except SampleError as error:
                self.damaged[shard, -1] = Fault(entry.name, "", str(error).removeprefix(f"{entry.name}: "))
        for labels in self.labels:
            self.images_of_class[list(labels)] += 1

    def _chosen_shards(self, most_labels: int) -> list[int]:
        sizes = self.shards.shard_sizes
        chosen: list[int] = []
        labels = fetched = 0
        for shard in _shuffled(len(sizes), _SHARDS, seed=self.seed).tolist():
            is_here = is_local(self.shards.shards[shard].url)
            if labels and labels + sizes[shard] > most_labels:
                break
            if is_here or fetched < _MOST_FETCHED:
                chosen.append(shard)
                labels, fetched = labels + sizes[shard], fetched + (not is_here)
        return sorted(chosen)

    def sizes(self) -> Int64s:
        """Height, width and bytes of random images: [n, 3]."""
        found: list[tuple[int, int, int]] = []
        for number in sorted(_shuffled(len(self.places), _SIZES, seed=self.seed)[:MOST_SIZES].tolist()):
            shard, row = self.places[number]
            try:
                found.append((*self._size(shard, row), self.reader.image_bytes(shard, row=row)))
            except (CorruptSample, UnreadableImage, SampleError) as error:
                self._add_damage(shard, row, error)
        return np.array(found, np.int64).reshape(-1, 3)

    def _size(self, shard: int, row: int) -> tuple[int, int]:
        for most in _HEAD_BYTES:
            start = self.reader.head(shard, row=row, most_bytes=most)
            self.bytes_read += len(start)
            if size := peek_size(start):
                return size
        image = self._opened(shard, row)
        return image.height, image.width

    def _opened(self, shard: int, row: int) -> EncodedImage:
        return open_to_look(self._whole(shard, row), channels=self.shards.channels, limit=self.limit)

    def _whole(self, shard: int, row: int) -> bytes:
        image = self.reader.read(shard, row=row).image
        self.bytes_read += len(image)
        return image

    def draw(self, count: int) -> tuple[DrawnImage, ...]:
        """Draw from each class in turn until there are enough, skipping damaged images."""
        queues = self._queues()
        drawn: list[tuple[int, int, DrawnImage]] = []
        while queues and len(drawn) < count:
            for label in list(queues):
                image = None
                while image is None and queues[label]:
                    image = self._image(queues[label].popleft())
                if image is not None:
                    drawn.append((label, len(drawn), image))
                if not queues[label]:
                    del queues[label]
                if len(drawn) == count:
                    break
        return tuple(image for _, _, image in sorted(drawn, key=lambda each: each[:2]))

    def _queues(self) -> dict[int, deque[int]]:
        """Shuffle classes and their images. Several labels: the rarest counts; no label: a queue of their own."""
        of_class: dict[int, deque[int]] = {}
        for number in _shuffled(len(self.labels), _IMAGES, seed=self.seed).tolist():
            labels = self.labels[number]
            label = min(labels, key=lambda each: (self.images_of_class[each], each), default=self.shards.num_classes)
            of_class.setdefault(label, deque()).append(number)
        by_number = sorted(of_class)
        return {by_number[at]: of_class[by_number[at]] for at in _shuffled(len(by_number), _CLASSES, seed=self.seed)}

    def _image(self, number: int) -> DrawnImage | None:
        shard, row = self.places[number]
        try:
            image = self._opened(shard, row)
            pixels = reduced(image.pixels(), longest_side=_LONGEST_SIDE)
        except (CorruptSample, UnreadableImage, SampleError) as error:
            self._add_damage(shard, row, error)
            return None
        key = self.reader.key(shard, row=row)
        return DrawnImage(key, shard, row, self.labels[number], pixels, image.height, image.width)

    def _add_damage(self, shard: int, row: int, error: Exception) -> None:
        reason = error.reason if isinstance(error, CorruptSample) else str(error)
        name, key = self.shards.shards[shard].name, self.reader.key(shard, row=row)
        self.damaged[shard, row] = Fault(name, key, reason)


def reduced(pixels: Pixels, *, longest_side: int) -> Pixels:
    """Shrink an image to a longest side of at most that, keeping proportions: [height, width, channels]; floats
    without a filter."""
    if (longest := max(pixels.shape)) <= longest_side:
        return pixels
    if pixels.dtype != np.uint8:
        step = -(-longest // longest_side)
        return pixels[::step, ::step]
    from PIL import Image

    picture = Image.fromarray(pixels)
    picture.thumbnail((longest_side, longest_side))
    return np.asarray(picture)


def _shuffled(count: int, what: int, *, seed: int) -> NDArray[np.int64]:
    drawn = hash_words(RandomStream.OVERVIEW, seed, what, np.arange(count, dtype=np.uint64))
    return np.argsort(drawn, kind="stable").astype(np.int64)
