"""A look at the shards themselves when a stage begins or goes on: a few samples of a few shards, always the same ones.

Which ones depends on the numbers of shards and samples alone. At most 64 shards are opened and 2,048 samples read, and
of one shard no more than a 64th of 128 MiB: 0.1 to 0.3 s from a warm disk, a few seconds from a cold one. Sets of up
to 64 shards with no more samples each than their part of the 2,048 are read as a whole. Of a larger one with N samples,
images that were exchanged here and there, k of them in all, are noticed with probability 1 - (1 - 2048 / N)^k:
k = 1,500 of N = 1,281,167 with 0.91. So this is the second line: what is written, even with its time set back, has
another time of inode change, and then all its bytes are compared (see `compare_suspects`). Shards that are not local
are not read here: a packed one is held to the manifest's digest when it is downloaded, another tool's tar to its ETag,
or, where that is another, to its new index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from data_shards.checking.identity import SetIdentity
from data_shards.errors import CorruptSample, UserError
from data_shards.foreign.tar import pixels_digest, spread
from data_shards.processes import num_cores
from data_shards.shard_reader import ShardReader
from data_shards.shard_set import ShardEntry, ShardSet
from data_shards.store.location import is_local, local_path
from data_shards.tars.shard_index import load_index

MOST_SHARDS = 64
MOST_SAMPLES = 2048
_MOST_BYTES = 128 << 20  # of all samples together
# Of suspects that are read, whole where the manifest has their digest: a second or two at SHA-256's speed.
MOST_SUSPECT_BYTES = 1 << 30
_THREADS = 16  # they wait for the disk, or are in SHA-256, which needs no GIL
_PIXELS_BYTES = 1 << 20  # that `pixels_digest` reads of a tar


def identify(shards: ShardSet) -> SetIdentity:
    """What a set is now.

    Raises:
        UserError: a shard that is looked at cannot be read, or its index lies.
    """
    numbers = [number for number in spread(len(shards.shards), most=MOST_SHARDS) if is_local(shards.shards[number].url)]
    rows = MOST_SAMPLES // max(1, min(len(shards.shards), MOST_SHARDS))
    most_bytes = _MOST_BYTES // max(1, min(len(shards.shards), MOST_SHARDS))
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda number: _look(shards, number, rows=rows, most_bytes=most_bytes), numbers))
    return SetIdentity.of(shards, spots=dict(zip(numbers, found, strict=True)))


@dataclass(frozen=True)
class Compared:
    """What came of looking at suspects: numbers of shards."""

    unlike: tuple[int, ...]  # other content than before
    same: tuple[int, ...]
    unseen: tuple[int, ...]  # not read, because they are too many, or remote


def compare_suspects(shards: ShardSet, before: SetIdentity, suspects: Sequence[int]) -> Compared:
    """Read shards whose stamps have changed, up to `MOST_SUSPECT_BYTES` of them.

    Wholly where the manifest has their digest; of another tool's tar, 16 images, since its index was compared. The rest
    counts as unseen.
    """
    chosen: list[int] = []
    left_bytes = MOST_SUSPECT_BYTES
    for shard in suspects:
        entry = shards.shards[shard]
        cost = (entry.num_bytes or 0) if entry.sha256 else _PIXELS_BYTES
        if is_local(entry.url) and (cost <= left_bytes or not chosen):
            chosen.append(shard)
            left_bytes -= cost
    with ThreadPoolExecutor(max(2, min(_THREADS, num_cores()))) as pool:
        alike = dict(zip(chosen, pool.map(lambda shard: _is_alike(shards, before, shard), chosen), strict=True))
    for shard in suspects:
        entry = shards.shards[shard]
        if not is_local(entry.url) and entry.pixels_digest and before.pixels[shard]:
            alike[shard] = True  # it was indexed again, and `differences` has compared what was found
    return Compared(
        unlike=tuple(shard for shard, same in alike.items() if not same),
        same=tuple(shard for shard, same in alike.items() if same),
        unseen=tuple(shard for shard in suspects if shard not in alike),
    )


def _is_alike(shards: ShardSet, before: SetIdentity, shard: int) -> bool:
    entry = shards.shards[shard]
    if entry.state == "damaged":
        return True  # told when the set was opened, and held against a budget
    if before.sha256[shard]:
        return _sha256(entry) == before.sha256[shard]
    if before.pixels[shard] and entry.index is not None:
        return pixels_digest(str(local_path(entry.url)), load_index(entry.index)) == before.pixels[shard]
    return True  # nothing is known of it but what was compared already


def _sha256(entry: ShardEntry) -> str:
    try:
        with open(local_path(entry.url), "rb", buffering=0) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{entry.name}: cannot be read ({error.strerror})") from None


def _look(shards: ShardSet, number: int, *, rows: int, most_bytes: int) -> list[str]:
    """Digests of samples of a shard: of key, labels and image."""
    entry = shards.shards[number]
    reader = ShardReader(shards)
    digests: list[str] = []
    done_bytes = 0
    try:
        for row in spread(entry.num_samples, most=rows):
            if done_bytes > most_bytes:
                break
            try:
                sample = reader.read(number, row=row)
            except CorruptSample:
                digests.append("")
                continue
            head = f"{sample.key!r} {sample.labels} ".encode("utf-8", "surrogateescape")
            digests.append(hashlib.blake2b(head + sample.image, digest_size=8).hexdigest())
            done_bytes += len(sample.image)
    finally:
        reader.close()
    return digests
