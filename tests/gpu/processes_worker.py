"""One rank of test_processes.py: `python processes_worker.py OUT RANK WORLD`. Rank 0 writes OUT/results.pt after each
case, from that of OUT/first on."""

import sys
from pathlib import Path
from typing import Any

import torch

from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from tests.gpu.twenty_steps import ENGINES, STEPS, opened, recipe_for

CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, fp32": keys for name, keys in ENGINES.items()},
    **{f"ZeRO {stage}, bf16": {"zero_stage": stage, "precision": "bf16"} for stage in (1, 3)},
    "ZeRO 1, bf16, small buckets": {"precision": "bf16", "bucket_elements": 60_000},
    "ZeRO 1, bf16, overlap off": {"precision": "bf16", "overlap": "off"},
    "ZeRO 1, bf16, compiled": {"precision": "bf16", "compile": "blocks"},
    "ZeRO 2, fp32, small buckets": {"zero_stage": 2, "bucket_elements": 60_000},
}


def main() -> None:
    out, rank, world = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    place = Place(rank=rank, world_size=world, local_rank=rank, local_world_size=world, rendezvous=out)
    ranks = Ranks(place, timeout_seconds=120)
    results: dict[str, Any] = {"backend": torch.distributed.get_backend(), "cases": {}}
    _write(results, out, ranks=ranks)
    for name, keys in [*CASES.items()][int((out / "first").read_text()) :]:
        with opened(recipe_for(keys), ranks=ranks) as training:
            rows = training.run(range(STEPS))
            weights = training.engine.weights()
        results["cases"][name] = ([(row.loss, row.outcome.applied) for row in rows], weights)
        _write(results, out, ranks=ranks)
        print(name, flush=True)
    ranks.barrier()
    ranks.leave()


def _write(results: dict[str, Any], out: Path, *, ranks: Ranks) -> None:
    if ranks.place.is_main:
        torch.save(results, out / "new.pt")
        (out / "new.pt").replace(out / "results.pt")


if __name__ == "__main__":
    main()
