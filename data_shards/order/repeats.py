"""Repeated augmentation: each image several times in a batch, augmented differently (Hoffer et al., arXiv 1901.09335).

A lane's stream is that of the order below with each image `repeats` times in succession, so the position in training
stays one number, the images seen, repeats included. Over the set an image comes once a pass, `repeats` times in its
batch, also in a mixture; damaged ones are replaced by one image in all their places. If `repeats` does not divide what
a lane gives to a batch (1024 images and 3 repeats), a lane's first and last image may have the others of theirs in the
batch before and after; DeiT's `RASampler`, which cuts one sequence into batches, splits only the batch's.

Mixing takes the next slot as the partner. So a lane's slots hold first one copy of each of its images, then the second
copies, with a distance of two images from slot to slot, and so on: no slot is next to its own copy, and the copies of
an image have different partners. DeiT spreads them over GPUs instead; here a rank keeps to its own lanes' shards.

Everything random is keyed by (epoch, sample). `SampleRefs.epoch` is therefore epoch * repeats + copy, which is new for
each showing. Cost: each copy is read and decoded again.
"""

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.sample_order import Int64s, LaneStream, SampleRefs


class RepeatedOrder(LaneStream):
    """The stream of `order` with each image `repeats` times; UserError as `check_repeats`."""

    def __init__(self, order: LaneStream, *, repeats: int, global_batch_images: int) -> None:
        check_repeats(repeats, lanes=order.lanes, global_batch_images=global_batch_images)
        cut = {"lanes": order.lanes, "global_batch_images": global_batch_images}
        super().__init__(order.num_samples, num_shards=order.num_shards, **cut)
        self.order, self.repeats = order, repeats
        self._arranged = np.stack([arrangement(self.images_per_lane, repeats=repeats, first=n) for n in range(repeats)])

    def resolve(self, lane: Int64s, position: Int64s, *, attempt: int = 0) -> SampleRefs:
        """See `LaneStream.resolve`; the epoch counts showings of the sample."""
        slot = position % self.images_per_lane
        start = position - slot
        below, copy = np.divmod(start + self._arranged[start % self.repeats, slot], self.repeats)
        refs = self.order.resolve(lane, below, attempt=attempt)
        showing = refs.epoch * self.repeats + copy
        return SampleRefs(showing, shard=refs.shard, row=refs.row, sample=refs.sample, lane=lane, position=position)


def images_below(global_batch_images: int, *, lanes: int, repeats: int) -> int:
    """Size a batch of the order below: as many different images as a batch holds at most, in whole ones a lane."""
    return -(-global_batch_images // (lanes * repeats)) * lanes


def arrangement(images: int, *, repeats: int, first: int) -> Int64s:
    """Arrange a lane's part of a batch: [images] places of the sequence a a a b b b ..., entered at its `first` place.

    Copy k of each image comes before copy k + 1, and copies k are taken in steps of k + 1 images.
    """
    image, copy = np.divmod(np.arange(first, first + images, dtype=np.int64), repeats)
    of_copy = image - (copy < first)  # the first image lacks those that came in the batch before
    return np.lexsort((image, of_copy % (copy + 1), copy)).astype(np.int64)


def check_repeats(repeats: int, *, lanes: int, global_batch_images: int) -> None:
    """UserError if a lane's part of a batch may hold fewer than two different images."""
    if repeats > 1 and global_batch_images < 2 * lanes * repeats:
        most = max(
            (n for n in range(1, lanes) if global_batch_images % n == 0 and n * 2 * repeats <= global_batch_images),
            default=0,
        )
        change = f"set data.lanes to {most}, or less" if most else f"set global_batch_size to {2 * lanes * repeats}"
        raise UserError(
            f"augment.repeats is {repeats}, but each of {lanes} data.lanes gives only {global_batch_images // lanes} "
            f"images to a batch of {global_batch_images}, less than two different ones: {change}"
        )
