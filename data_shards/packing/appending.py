"""Continue a packed set's numbers with the plan of what is appended to it. No I/O."""

import re
from dataclasses import replace

import numpy as np

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.shard_plan import LABEL_SPECS, PackPlan, ShardPlan
from shardvit.data_shards.packing.sources.base import SplitName
from shardvit.data_shards.sets.live import LiveSet
from shardvit.data_shards.shards.location import redacted
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.text import counted, named

_NUMBERED = re.compile(r"-(\d+)\.tar$")


def go_on(plan: PackPlan, live: LiveSet, *, first_number: int) -> PackPlan:
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
    splits: dict[SplitName, list[ShardPlan]] = {}
    for split, shards in plan.splits.items():
        first = _next_shard(live.manifests.get(split))
        splits[split] = [
            replace(
                shard,
                file=_NUMBERED.sub(lambda found: f"-{int(found[1]) + first:06d}.tar", shard.file),  # noqa: B023
                images=replace(shard.images, labels=new_label[shard.labels]),
                first_number=first_number,
                classes=tuple(known),
            )
            for shard in shards
        ]
    new = tuple(known)[len(live.classes) :]
    what = "a run's head has the classes it began with, so only new runs can take them"
    note = (f"{counted(len(new), 'new class')} behind the {len(live.classes):,} there are: {named(new)}; {what}",)
    return replace(plan, classes=tuple(known), splits=splits, notes=(*plan.notes, *(note if new else ())))


def _next_shard(manifest: Manifest | None) -> int:
    found = [_NUMBERED.search(shard.file) for shard in manifest.shards] if manifest else []
    return max((int(each[1]) + 1 for each in found if each), default=0)
