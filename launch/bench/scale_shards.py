"""Measures of `launch.bench.scale`: a set of 10^5 shards, opened on rank 0, sent to another rank, passed to workers.

Tars are empty, in their real number; the manifest has its real size (19 MB). CPU seconds of a fresh process.
"""

import hashlib
import io
import json
import pickle
import resource
import sys
import tempfile
import time
from contextlib import closing, suppress
from multiprocessing import reduction
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shardvit.launch.bench.measure import run_json
from shardvit.launch.bench.scale import RANKS, SAMPLES, SHARDS, Row

_CLASSES = 1000


def opening() -> list[Row]:
    """Measure opening on rank 0, receiving on another rank, and passing to workers."""
    with tempfile.TemporaryDirectory() as name:
        folder = _synthetic(Path(name))
        first, other, worker = (
            run_json("shardvit.launch.bench.scale_shards", what, str(folder), f"{name}/sent")
            for what in ("open", "receive", "worker")
        )
    machine = "Before: 8.1 CPU s and 255 MB on the machine of the counts, 2.1 CPU s and 140 MB on this record's."
    return [
        Row(
            "open 10^5 shards, rank 0: CPU s; peak MB above start",
            "8.1; 255",
            f"{first['cpu']:.2f}; {first['megabytes']:.0f}",
            "<= 1",
            f"{SAMPLES:,} samples, empty tars on a local disk. {machine}",
        ),
        Row(
            "open 10^5 shards, another rank: CPU s; peak MB above start",
            "8.1; 255",
            f"{other['cpu']:.2f}; {other['megabytes']:.0f} ({other['sent'] / 1e6:.1f} MB received)",
            "<= 0.3",
            "What rank 0 sends is read from a file and unpickled, and a loader asks it for sizes and one shard.",
        ),
        Row(
            "file operations when 1,024 ranks open 10^5 shards",
            f"{RANKS * SHARDS:,} stat",
            f"{SHARDS + RANKS // 8 * 6:,} (calculated: rank 0 all, each host's first rank at most 6)",
            "",
            "On a shared folder; a host with other files behind the path looks at its own disk, once a host "
            "(tests/pipeline/stage/test_data_once.py counts who opens).",
        ),
        Row(
            "sent to a worker process: MB; CPU s to pickle",
            "23; 1.1 with unpickling",
            f"{worker['sent'] / 1e6:.2f}; {worker['cpu']:.2f}",
            "",
            "Everything that the fork server is sent for two worker processes of one loader, per process; the columns "
            "lie in shared memory.",
        ),
    ]


def _synthetic(root: Path) -> Path:
    folder = root / "train"
    folder.mkdir()
    shards = []
    for number in range(SHARDS):
        file = f"train-{number:06}.tar"
        digest = hashlib.sha256(file.encode()).hexdigest()
        shards.append({"file": file, "num_samples": SAMPLES // SHARDS, "num_bytes": 0, "sha256": digest})
        (folder / file).touch()
    classes = [f"class {number}" for number in range(_CLASSES)]
    content = {
        "version": 1,
        "name": "synthetic",
        "split": "train",
        "source": "nothing",
        "num_samples": SAMPLES,
        "classes": classes,
        "label_map": {name: number for number, name in enumerate(classes)},
        "labels": {"part": "cls", "key": None, "kind": "single"},
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(content, indent=1))
    return folder


def _measure(what: str, folder: Path, wire: Path) -> dict[str, float]:
    import numpy as np  # every rank has imported it anyway

    from shardvit.data_shards.images.transforms import EvalTransform
    from shardvit.data_shards.loading.assemble import Access
    from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
    from shardvit.data_shards.reading.opening import open_shards

    start, before = time.process_time(), _peak_megabytes()
    sent = 0
    if what == "open":
        shards = open_shards(str(folder))
        wire.write_bytes(content := pickle.dumps(shards, protocol=5))
        sent = len(content)
    elif what == "receive":
        content = bytearray(wire.read_bytes())
        sent = len(content)
        shards = pickle.loads(content)
        assert int(np.sum(shards.shard_sizes)) == SAMPLES and shards.shards[SHARDS // 2].num_samples
    else:
        shards = pickle.loads(wire.read_bytes())
        sizes: list[int] = []
        dump = reduction.dump

        def counted(content: object, file: io.BytesIO, *rest: Any) -> None:
            nonlocal start
            begin = time.process_time()
            dump(content, file, *rest)
            spent.append(time.process_time() - begin)
            sizes.append(file.tell())

        spent: list[float] = []
        transform = EvalTransform(32)
        batches = EvalBatches(Access(shards), transform=transform, rank=0, world_size=1, batch_size=1)
        with (
            patch.object(reduction, "dump", counted),
            closing(eval_batches(batches, workers=2)) as items,
            suppress(ValueError),  # the tars are empty
        ):
            next(iter(items))
        return {"sent": sum(sizes) / 2, "cpu": sum(spent) / 2, "megabytes": 0.0}
    return {"cpu": time.process_time() - start, "megabytes": _peak_megabytes() - before, "sent": sent}


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
