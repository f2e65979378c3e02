"""Record a stage's data in STAGE/data.json and refuse to resume with other data, naming the difference. No torch.

`shardvit run` compares before it starts processes, rank 0 again (`data_shards.checking.identity`). stage.json keeps the
digest, so a lost or altered data.json is noticed. The record names the manifests, too: a run goes on with those when
images have been appended to its sets meanwhile.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardvit.data_shards.checking.identity import SetIdentity, compare_suspects, differences, identify, suspects
from shardvit.data_shards.durable import replace_text
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.text import named, parse_json
from shardvit.pipeline.recipe.vocabulary import DATA_FILE, StageName
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.stage_data import HELD_OUT_IMAGES, TRAINING_IMAGES, StageData

_VERSION = 1  # of the file; other versions are ignored


@dataclass(frozen=True)
class DataRecord:
    """Contents of data.json."""

    sets: Mapping[str, SetIdentity]  # named as `StageData.recorded`
    notes: tuple[str, ...] = ()  # a sentence each
    manifests: Mapping[str, str] = field(default_factory=dict)  # as in `StageData`

    @property
    def digest(self) -> str:
        """Digest of the content; a copy elsewhere has the same."""
        return "-".join(one.content_digest[:16] for one in self.sets.values())


def has_record(folder: RunFolder, *, stage: StageName) -> bool:
    """True if there is a record to compare with."""
    return bool(folder.peek(stage).data_digest) or (folder.stage(stage) / DATA_FILE).exists()


def kept_manifests(folder: RunFolder, *, stages: Sequence[StageName]) -> dict[str, str]:
    """Return the manifests that these stages of a run began with, {location: digest}; the last one's count."""
    found: dict[str, str] = {}
    for stage in stages:
        if record := _read(folder.stage(stage) / DATA_FILE, digest=""):
            found |= record.manifests
    return found


def check_data(folder: RunFolder, *, stage: StageName, data: StageData) -> DataRecord:
    """Compare a stage's data with its record, writing nothing; UserError names a difference or an unreadable shard."""
    sets = data.recorded
    now = DataRecord({name: identify(one) for name, one in sets.items()}, manifests=data.manifests)
    path, digest = folder.stage(stage) / DATA_FILE, folder.peek(stage).data_digest
    before = _read(path, digest=digest)
    if before is None:
        if digest and digest != now.digest:
            raise _changed(folder, stage, f"its data as a whole ({path} is gone or altered, and cannot say which)")
        return now
    notes: list[str] = []
    kept = dict(now.sets)
    for name, old in before.sets.items():
        if name not in now.sets:  # no longer evaluated
            continue
        if found := differences(old, now.sets[name]):
            raise _changed(folder, stage, f"{name}: {'; '.join(found)}")
        kept[name], note = _compare_suspects(folder, stage, name=name, shards=sets[name], old=old, new=now.sets[name])
        notes += note
    return DataRecord(kept, notes=tuple(notes), manifests=data.manifests)


def keep_data(folder: RunFolder, record: DataRecord, *, stage: StageName) -> None:
    """Write data.json atomically, before stage.json gets `record.digest`; OSError if the disk is full or fails."""
    sets = {name: vars(one) for name, one in record.sets.items()}
    content = {"version": _VERSION, "sets": sets, "manifests": dict(record.manifests)}
    folder.stage(stage).mkdir(exist_ok=True)
    replace_text(folder.stage(stage) / DATA_FILE, json.dumps(content) + "\n")


def _compare_suspects(
    folder: RunFolder, stage: StageName, *, name: str, shards: ShardSet, old: SetIdentity, new: SetIdentity
) -> tuple[SetIdentity, list[str]]:
    """Compare a set whose files differ only in their times; returns the record to keep and what to report."""
    touched = suspects(old, new)
    alike = compare_suspects(shards, old, touched)
    unseen = [shard for shard in touched if shard not in alike]
    if unlike := [shard for shard, same in alike.items() if not same]:
        names = named([new.names[shard] for shard in unlike], most=3)
        raise _changed(folder, stage, f"{name}: {names} has the size it had but other bytes")
    note: list[str] = []
    if unseen:
        note = [
            f"{stage}: {len(touched):,} shards of the {name} have other times than before; the content of "
            f"{len(alike):,} was compared and is the same, of the others only what each start reads"
        ]
    local_unseen = [shard for shard in unseen if new.sha256[shard] or new.pixels[shard]]
    return old.seen_as(new, unseen=local_unseen), note


def _changed(folder: RunFolder, stage: StageName, what: str) -> UserError:
    return UserError(
        f"{folder.stage(stage)} was begun with other data than there are now: {what}: bring the old ones back, or "
        f"begin again with --restart {stage}"
    )


def _read(path: Path, *, digest: str) -> DataRecord | None:
    """None if it is absent, broken, or not of this `digest` ("": any)."""
    try:
        content = parse_json(path.read_bytes())
        if content["version"] != _VERSION or list(content["sets"])[:2] != [TRAINING_IMAGES, HELD_OUT_IMAGES]:
            return None
        given = content.get("manifests", {})  # none in a record from before
        manifests = {place: digest for place, digest in given.items() if re.fullmatch(r"[0-9a-f]{32}", digest)}
        sets = {name: SetIdentity.from_json(one) for name, one in content["sets"].items()}
        record = DataRecord(sets, manifests=manifests)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if digest in ("", record.digest) else None
