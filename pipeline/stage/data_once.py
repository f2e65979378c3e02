"""A stage's shards on many ranks: rank 0 looks at them and tells the others, so that a file server is asked once.

Rank 0 opens the sets (one `stat` a shard) and sends them over the process group as columns, 130 bytes a shard. A host
whose first rank finds other files in their place (by inode, size and times of each set's manifest, first and last
shard) has disks of its own: that rank looks at all of its shards, and its host's ranks hear what is damaged there. So a
shard that is missing on one host's disk is found at the start, in the words of `open_shards`, and one that disappears
later by the rank that reads it. Tars without a manifest have indexes on each host: where those are not rank 0's files,
every rank opens the sets by itself.

Cost: rank 0 what `open_data` costs; the others 13 MB and milliseconds for 10^5 shards, and each host 6 `stat`s.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Literal

from data_shards.errors import AgreedError, UserError
from data_shards.shards.shard_set import ShardSet
from pipeline.ranks.process import this_machine
from pipeline.recipe.vocabulary import StageName
from pipeline.stage.context import StageContext
from pipeline.stage.stage_data import StageData, open_data, store_of

_Identity = tuple[int, int, int, int] | None


@dataclass(frozen=True)
class _Sent:
    """Data as rank 0 opened it."""

    train: ShardSet | None = None
    train_sizes: tuple[tuple[int, ...], ...] = ()
    weights: tuple[float, ...] | None = None
    held_out: tuple[tuple[str, ShardSet], ...] = ()  # by name, the stage's own first
    landmarks: tuple[tuple[str, _Identity], ...] = ()


@dataclass(frozen=True)
class _OwnDisks:
    """Data as the first rank of another host found it on its own disks."""

    machine: str
    problem: str = ""
    opens: Literal["once", "each rank"] = "once"
    damaged: tuple[tuple[int, ...], ...] = ()  # this and the next two: of the training set, of the held-out ones
    damage: tuple[tuple[str, ...], ...] = ()
    lost_samples: tuple[int, ...] = ()


def open_data_once(context: StageContext, *, stage: StageName) -> StageData:
    """Open a stage's training data once for all ranks; collective. All ranks raise the UserError of any of them."""
    recipe, ranks = context.recipe, context.ranks
    place = ranks.place
    if place.world_size == 1:
        return open_data(recipe, stage=stage, report=context.say, commands="run")
    # Tars of other tools are indexed first, which may take hours.
    data = context.on_main(lambda: open_data(recipe, stage=stage, report=context.say, commands="run"), takes="long")
    sent = _Sent()
    if data is not None:
        held_out = tuple(data.held_out.items())
        marks = _landmarks(data.train, *data.held_out.values())
        sent = _Sent(data.train, data.train_sizes, data.weights, held_out, marks)
    sent = ranks.from_main(sent)
    assert sent.train is not None and sent.held_out
    finding: _OwnDisks | None = None
    if place.local_rank == 0 and not place.is_main and any(_identity(path) != seen for path, seen in sent.landmarks):
        finding = _look_at_own(context, sent, stage=stage)
    findings = [each for each in ranks.gather_objects(finding) if each is not None]
    for each in findings:
        if each.problem:
            raise AgreedError(each.problem)
    if data is not None:
        return data
    ours = next((each for each in findings if each.machine == this_machine()), None)
    if ours is not None and ours.opens == "each rank":
        return open_data(recipe, stage=stage, report=context.say, commands="run")
    sets = _sets(sent)
    if ours is not None:
        sets = [
            shards.with_damaged(ours.damaged[at], damage=ours.damage[at], lost_samples=ours.lost_samples[at])
            for at, shards in enumerate(sets)
        ]
    train, own, *more = sets
    also_eval = dict(zip([name for name, _ in sent.held_out[1:]], more, strict=True))
    return StageData(train, sent.train_sizes, sent.weights, own, store_of(recipe, commands="run"), also_eval)


def _sets(sent: _Sent) -> list[ShardSet]:
    """The training set, and the held-out ones."""
    assert sent.train is not None
    return [sent.train, *(each for _, each in sent.held_out)]


def _look_at_own(context: StageContext, sent: _Sent, *, stage: StageName) -> _OwnDisks:
    machine, host = this_machine(), platform.node()
    if not all(one.shards.has_manifests for one in _sets(sent)):
        return _OwnDisks(machine, opens="each rank")  # they wait for one another's index without a time limit
    try:
        data = open_data(context.recipe, stage=stage, report=lambda line: None, commands="run")
    except UserError as error:
        return _OwnDisks(machine, problem=f"on host {host}: {error}")
    sets = [data.train, *data.held_out.values()]
    pairs = list(zip(sets, _sets(sent), strict=True))
    for own, first in pairs:
        if own.digest != first.digest:
            return _OwnDisks(
                machine,
                problem=f"on host {host}: {own.source} is not the set that rank 0 has under that name: copy the same "
                "shards to every host",
            )
    if any(own.shards.sources != first.shards.sources for own, first in pairs):  # rank 0's entries lead elsewhere
        return _OwnDisks(machine, opens="each rank")
    return _OwnDisks(
        machine,
        damaged=tuple(tuple(one.damaged_numbers) for one in sets),
        damage=tuple(one.damage for one in sets),
        lost_samples=tuple(one.lost_samples for one in sets),
    )


def _landmarks(*sets: ShardSet) -> tuple[tuple[str, _Identity], ...]:
    files = dict.fromkeys(file for one in sets for file in one.shards.landmarks)
    return tuple((path, _identity(path)) for path in files)


def _identity(path: str) -> _Identity:
    """The same for one file seen from two hosts, and hardly ever for two files; None: it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
