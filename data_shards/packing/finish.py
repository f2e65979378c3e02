"""The end of a packing: manifests of what was written, or the error that names what cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_shards.errors import UserError
from data_shards.manifest import Manifest, write_manifest
from data_shards.packing.found import UnreadableFile, write_unreadable
from data_shards.packing.shard_plan import LABEL_SPECS, PackPlan, ShardPlan, class_numbers
from data_shards.packing.summary import UNREADABLE_FILE
from data_shards.packing.work import ShardRecord
from data_shards.sources import Source
from data_shards.tars.tar_index import index_path

NAMED_FAILURES = 5


def write_manifests(
    plan: PackPlan,
    source: Source,
    records: Mapping[str, ShardRecord],
    folder: Path,
    report: Callable[[str], None],
) -> list[Manifest]:
    """One for each split. Shards of which no image could be read are removed."""
    manifests: list[Manifest] = []
    for split, shards in plan.splits.items():
        found = [records[shard.file].shard for shard in shards]
        for shard in found:
            if not shard.num_samples:
                (folder / split / shard.file).unlink()
                index_path(folder / split / shard.file).unlink()
        kept = tuple(shard for shard in found if shard.num_samples)
        if not kept:
            raise UserError(f"{source.spec}: no image of split {split} can be read; mend them")
        for name in _lost_classes(plan, shards, records):
            report(f"no image of the class {name} in split {split} can be read")
        spec = LABEL_SPECS[plan.kind]
        manifest = Manifest(folder / split, source.name, split, plan.classes, kept, source.spec, labels=spec)
        write_manifest(manifest)
        manifests.append(manifest)
    return manifests


def _lost_classes(plan: PackPlan, shards: Sequence[ShardPlan], records: Mapping[str, ShardRecord]) -> list[str]:
    """Classes with planned images of which none is packed."""
    planned: set[int] = set()
    packed: set[int] = set()
    for shard in shards:
        refused = [entry.position for entry in records[shard.file].refused]
        planned.update(number for position in refused for number in shard.class_numbers(position))
        packed.update(class_numbers(np.delete(shard.labels, refused, axis=0).ravel()))
    return [plan.classes[number] for number in sorted(planned - packed)]


def unreadable_error(refused: Sequence[UnreadableFile], source: Source, plan: PackPlan, out: Path) -> UserError:
    """Writes the whole list beside OUT."""
    path = list_beside(out)
    write_unreadable(refused, path)
    named = "; ".join(f"{file.path} ({file.reason})" for file in refused[:NAMED_FAILURES])
    more = f"; and {len(refused) - NAMED_FAILURES:,} more" if len(refused) > NAMED_FAILURES else ""
    return UserError(
        f"{source.spec}: {len(refused):,} of {plan.num_images:,} images cannot be read: {named}{more}; all are listed "
        f"in {path}: mend or remove them, or add --skip-unreadable, and the command goes on from here"
    )


def list_beside(out: Path) -> Path:
    """`a/OUT` -> `a/OUT.unreadable.jsonl`."""
    return out.with_name(f"{out.name}.{UNREADABLE_FILE}")
