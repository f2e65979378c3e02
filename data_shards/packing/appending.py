"""Continue a packed set's numbers with the plan of what is appended to it."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.plan_file import PackJob
from shardvit.data_shards.packing.seen import known_digests
from shardvit.data_shards.packing.shard_plan import LABEL_SPECS, PackPlan, ShardPlan, Start
from shardvit.data_shards.sets.live import LiveSet, open_live
from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.text import counted, named

_NUMBERED = re.compile(r"-(\d+)\.tar$")


def start_of(live: LiveSet) -> Start:
    """Start behind all that a set has; UserError without its images.bin."""
    images = sum(map(len, _known(live)))
    shards = {split: _next_shard(manifest) for split, manifest in live.manifests.items()}
    return Start(len(live.packings), images, shards)  # type: ignore[arg-type]


def go_on(plan: PackPlan, live: LiveSet, start: Start) -> PackPlan:
    """Continue a set's numbers of classes, shards and images with a plan of its own.

    Classes keep their numbers, new ones come behind. UserError if labels are of another kind.
    """
    kind = live.manifests["train"].labels.kind
    if LABEL_SPECS[plan.kind] != live.manifests["train"].labels:
        raise UserError(
            f"{redacted(live.folder.location)}: its samples have {kind} labels, those of the source {plan.kind} ones: "
            "pack them into a set of their own"
        )
    known = dict.fromkeys((*live.classes, *plan.classes))
    number_of = {name: number for number, name in enumerate(known)}
    new_label = np.array([*(number_of[name] for name in plan.classes), -1], np.int64)

    def shifted(shard: ShardPlan, number: int) -> ShardPlan:
        return replace(
            shard,
            file=_NUMBERED.sub(f"-{number:06d}.tar", shard.file),
            images=replace(shard.images, labels=new_label[shard.labels]),
            first_number=start.images,
            classes=tuple(known),
        )

    splits = {
        split: [shifted(shard, number) for number, shard in enumerate(shards, start.shards.get(split, 0))]
        for split, shards in plan.splits.items()
    }
    new = tuple(known)[len(live.classes) :]
    what = "a run's head has the classes it began with, so only new runs can take them"
    note = (f"{counted(len(new), 'new class')} behind the {len(live.classes):,} there are: {named(new)}; {what}",)
    return replace(plan, classes=tuple(known), splits=splits, notes=(*plan.notes, *(note if new else ())))


def _next_shard(manifest: Manifest | None) -> int:
    found = [_NUMBERED.search(shard.file) for shard in manifest.shards] if manifest else []
    return max((int(each[1]) + 1 for each in found if each), default=0)


def has_before(live: LiveSet, digests: bytes) -> NDArray[np.bool_]:
    """Mark images by their digests of which a set has the bytes."""
    words = np.dtype([("first", np.uint64), ("second", np.uint64)])
    new, known = np.frombuffer(digests, np.uint64).reshape(-1, 2), np.concatenate(_known(live))
    return np.isin(new.view(words).ravel(), known.view(words).ravel()) & new.any(axis=1)


def _known(live: LiveSet) -> list[NDArray[np.uint64]]:
    return [known_digests(live.lists(number)) for number in range(len(live.packings))]


def open_again(job: PackJob) -> LiveSet:
    """Open the set that a planned packing is appended to; UserError if it is another than then."""
    live = open_live(job.result)
    if start_of(live) != job.start:
        raise UserError(f"{redacted(job.out)}: other images were appended since this was planned; plan it again")
    return live


def appended_line(job: PackJob, live: LiveSet, added: Sequence[Manifest], digests: bytes) -> str:
    """Say what is appended, and how much of it the set had."""
    images, shards = sum(each.num_samples for each in added), sum(len(each.shards) for each in added)
    known = int(has_before(live, digests).sum())
    copies = f"; the set had the bytes of {known:,} of them (--drop-duplicates leaves such out)" if known else ""
    return f"{redacted(job.out)}: {counted(images, 'image')} appended in {counted(shards, 'shard')}{copies}"
