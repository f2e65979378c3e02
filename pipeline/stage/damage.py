"""Count damaged images over all ranks, list them, and limit them to data.max_corrupt_share.

Each rank notes its batches' faults; `settle` gathers them a few times a minute. Rank 0 writes
STAGE/corrupt_samples.jsonl, a line per image, and reads it on resume so that an image counts once. The loader picks
substitutes.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from shardvit.data_shards.durable import break_links
from shardvit.data_shards.loading.batch import Batch, Fault
from shardvit.pipeline.ranks.group import Ranks

Use = str  # "train", "eval", or "eval NAME" of a set of also_eval
_Faults = dict[tuple[Use, str, str], Fault]  # by use, shard and key


@dataclass(frozen=True)
class Settled:
    """Result of `settle`."""

    new: tuple[tuple[Use, Fault], ...]  # images not seen damaged before
    substituted_images: int  # in the batches since the last time


class FaultLedger:
    """Damaged images of one stage, listed in `file`. `complaint`: a sentence if more than `max_share` of a set's
    `num_samples` are damaged, the same on every rank."""

    def __init__(self, file: Path, *, num_samples: dict[Use, int], max_share: float) -> None:
        self.file, self._num_samples, self._max_share = file, num_samples, max_share
        self._known, self._mine, self._substituted = _read(file), _Faults(), 0
        self.complaint = self._complaint()

    def note(self, batch: Batch, *, use: Use, rows: int) -> None:
        """Note a batch's faults; only its first `rows` rows are this rank's own."""
        self._mine |= {(use, fault.shard, fault.key): fault for fault in batch.faults}
        if batch.faults:
            self._substituted += int(batch.substituted[:rows].sum())

    def settle(self, ranks: Ranks) -> Settled:
        """Gather all ranks' notes; collective."""
        parts = ranks.gather_objects((self._mine, self._substituted))
        new = {key: fault for mine, _ in parts for key, fault in mine.items() if key not in self._known}
        self._known |= new
        self._mine, self._substituted = {}, 0
        self.complaint = self._complaint()
        if new and ranks.place.is_main:
            _append(self.file, new)
        return Settled(tuple((key[0], fault) for key, fault in new.items()), sum(count for _, count in parts))

    def __len__(self) -> int:
        """Damaged images so far, over all attempts."""
        return len(self._known)

    def _complaint(self) -> str | None:
        for use, num_samples in self._num_samples.items():
            damaged = [fault for key, fault in self._known.items() if key[0] == use]
            if len(damaged) / num_samples > self._max_share:
                first = damaged[0]
                return (
                    f"{len(damaged)} of the {num_samples:,} images of {use} are damaged, more than "
                    f"data.max_corrupt_share {self._max_share:g} allows (the first: {first.key!r} of {first.shard}, "
                    f"{first.reason}); all are listed in {self.file}: bring back whole shards, or raise "
                    "data.max_corrupt_share"
                )
        return None


def _read(file: Path) -> _Faults:
    known = _Faults()
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else ():
        try:
            row = json.loads(line)
            known[row["set"], row["shard"], row["key"]] = Fault(row["shard"], row["key"], row["reason"])
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill: the image will come up again
    return known


def _append(file: Path, new: _Faults) -> None:
    # ASCII: tar member names that are not UTF-8 cannot be encoded.
    lines = [json.dumps({"set": use, **asdict(fault)}) for (use, _, _), fault in new.items()]
    break_links(file)
    with file.open("ab") as stream:
        torn = stream.tell() > 0 and not file.read_bytes().endswith(b"\n")
        stream.write((b"\n" if torn else b"") + "\n".join([*lines, ""]).encode())
        stream.flush()
        os.fsync(stream.fileno())
