"""Open a stage's shards once for many ranks, to spare the file server.

Rank 0 opens the sets (one `stat` per shard) and sends them over the process group, 130 bytes per shard. Each host's
first rank compares inode, size and times of each set's manifest, first and last shard. If they differ, the host has
its own disks: that rank checks all its shards and tells the host's ranks which are damaged, so a shard missing on one
host is found at the start. If tars have no manifest and their index is not rank 0's file, every rank opens the sets.

Costs rank 0 as much as `open_data`, the others 13 MB and milliseconds for 10^5 shards, and each host 6 `stat`s.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardvit.data_shards.errors import AgreedError, UserError
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.store import Store
from shardvit.pipeline.ranks.process import this_machine
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.stage.context import StageContext
from shardvit.pipeline.stage.data_record import kept_manifests
from shardvit.pipeline.stage.stage_data import StageData, open_data, store_of

_Identity = tuple[int, int, int, int] | None
_Landmarks = dict[str, _Identity]  # of each path
_Damage = tuple[tuple[int, ...], tuple[str, ...], int]  # shards, sentences, lost samples


@dataclass(frozen=True)
class _OwnDisks:
    """Result of the first rank of a host with its own disks."""

    machine: str
    problem: str = ""
    opens: Literal["once", "each rank"] = "once"
    damage: tuple[_Damage, ...] = ()  # of each set


def open_data_once(context: StageContext, *, stage: StageName) -> StageData:
    """Open a stage's data once for all ranks; collective. All ranks raise the UserError of any rank."""
    recipe, ranks = context.recipe, context.ranks
    place = ranks.place

    def open_here(manifests: Mapping[str, str]) -> StageData:
        return open_data(recipe, stage=stage, report=context.say, commands="run", manifests=manifests)

    def open_first() -> StageData:
        return open_here(kept_manifests(context.folder, stages=recipe.stages.trained))

    if place.world_size == 1:
        return open_first()
    data = context.on_main(open_first, takes="long")  # indexing other tools' tars may take hours
    sent: tuple[StageData, _Landmarks] | None = None
    if data is not None:
        sent = replace(data, store=Store()), _landmarks(data)
    sent = ranks.from_main(sent)
    assert sent is not None
    first, landmarks = sent
    finding: _OwnDisks | None = None
    if place.local_rank == 0 and not place.is_main and any(_identity(path) != seen for path, seen in landmarks.items()):
        finding = _look_at_own(context, first, stage=stage)
    findings = [each for each in ranks.gather_objects(finding) if each is not None]
    for each in findings:
        if each.problem:
            raise AgreedError(each.problem)
    if data is not None:
        return data
    ours = next((each for each in findings if each.machine == this_machine()), None)
    if ours is not None and ours.opens == "each rank":
        return open_here(first.manifests)  # whatever is appended meanwhile
    sets = _sets(first)
    if ours is not None:
        sets = [
            shards.with_damaged(numbers, damage=damage, lost_samples=lost)
            for shards, (numbers, damage, lost) in zip(sets, ours.damage, strict=True)
        ]
    held_out = dict(zip(first.held_out, sets[1:], strict=True))
    return replace(first, train=sets[0], held_out=held_out, store=store_of(recipe, commands="run"))


def _sets(data: StageData) -> list[ShardSet]:
    return [data.train, *data.held_out.values()]


def _look_at_own(context: StageContext, first: StageData, *, stage: StageName) -> _OwnDisks:
    machine, host = this_machine(), platform.node()
    if not all(source.folder for one in _sets(first) for source in one.shards.sources):  # tars without a manifest
        return _OwnDisks(machine, opens="each rank")  # ranks wait for one another's index without a time limit
    try:
        data = open_data(
            context.recipe, stage=stage, report=lambda line: None, commands="run", manifests=first.manifests
        )
    except UserError as error:
        return _OwnDisks(machine, problem=f"on host {host}: {error}")
    pairs = list(zip(_sets(data), _sets(first), strict=True))
    for own, other in pairs:
        if own.digest != other.digest:
            return _OwnDisks(
                machine,
                problem=f"on host {host}: {own.source} is not the set that rank 0 has under that name: copy the same "
                "shards to every host",
            )
    if any(own.shards.sources != other.shards.sources for own, other in pairs):  # rank 0's paths lead elsewhere here
        return _OwnDisks(machine, opens="each rank")
    damage = ((tuple(one.damaged_numbers), one.damage, one.lost_samples) for one in _sets(data))
    return _OwnDisks(machine, damage=tuple(damage))


def _landmarks(data: StageData) -> _Landmarks:
    return {path: _identity(path) for one in _sets(data) for path in one.shards.landmarks}


def _identity(path: str) -> _Identity:
    """The same for one file seen from two hosts, hardly ever for two files; None: no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
