"""Read back what TensorBoard and W&B were sent, each with its own reader, and what a run's file says."""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from shardvit.pipeline.runs.logs import MetricRow

Point = tuple[int, float, float]  # step, value, time
Curves = dict[str, list[Point]]


def curves_of(rows: Sequence[MetricRow], *, dtype: type = float) -> Curves:
    found: Curves = {}
    for row in rows:
        for name, value in {**row.metrics, "images_seen": row.images_seen}.items():
            found.setdefault(name, []).append((row.step, float(dtype(value)), row.time))
    return found


def opened(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def tensorboard_curves(folder: Path) -> Curves:
    """float32, which is what TensorBoard keeps."""
    events = opened(folder)
    return {
        name: [(each.step, float(np.float32(each.value)), each.wall_time) for each in events.Scalars(name)]
        for name in events.Tags()["scalars"]
        if events.Scalars(name)  # none: a rollback made it forget all
    }


def wandb_history(files: Path) -> list[dict[str, Any]]:
    """The rows of all offline files, in the order in which they were begun."""
    rows = []
    for path in sorted(files.glob("offline-run-*/run-*.wandb")):
        for record in _records(path.read_bytes()):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in items})
    return rows


def wandb_curves(rows: Sequence[dict[str, Any]]) -> Curves:
    """The curves of a history; a row replaces all from its line on."""
    kept: list[MetricRow] = []
    for row in rows:
        if "shardvit/row" in row:
            line, names = row["shardvit/line"], [name for name in row if not name.startswith(("_", "shardvit/"))]
            assert line <= len(kept) + 1, "a row is missing"
            values = {name: row[name] for name in names if name not in ("step", "images_seen")}
            kept[line - 1 :] = [MetricRow(row["step"], row["images_seen"], row["_timestamp"], values)]
    return curves_of(kept)


def _records(content: bytes) -> Iterator[Any]:
    """LevelDB's log format: blocks of 32 KiB; a checksum, a size and a kind before each piece."""
    assert content[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(content):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if kind == 0 or at + 7 + size > len(content):
            return
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield vars(wandb_internal_pb2)["Record"].FromString(whole)
            whole = b""
