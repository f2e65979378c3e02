"""One of two processes that add numbers up: `python -m launch.doctor.all_reduce BACKEND`, started by `network`.

They meet as the processes of a run do, in a private folder (`pipeline.ranks.group`). Rank 0 says how long one
number takes, and how many bytes a second a large tensor.
"""

from __future__ import annotations

import statistics
import sys
import time

from launch.doctor.child import say
from launch.env import read_place

LIMIT_SECONDS = 60.0
_LARGE_VALUES = 4 * 2**20  # 16 MiB of float32, as a bucket of gradients
_SMALL_REPEATS, _LARGE_REPEATS = 50, 5


def main(backend: str) -> int:
    """Take part; exit code 1 if the sum is wrong."""
    import torch
    from torch import distributed

    from pipeline.ranks.group import join_group

    place = read_place()
    device = torch.device("cuda", place.local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_group(place, backend=backend, timeout_seconds=LIMIT_SECONDS)

    def seconds(values: torch.Tensor) -> float:
        begin = time.perf_counter()
        distributed.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    total = torch.tensor([place.rank + 1.0], device=device)
    distributed.all_reduce(total)
    if total.item() != place.world_size * (place.world_size + 1) / 2:
        print(f"the sum came out as {total.item()}", file=sys.stderr)
        return 1
    small = [seconds(torch.ones(1, device=device)) for _ in range(_SMALL_REPEATS)]
    large = [seconds(torch.ones(_LARGE_VALUES, device=device)) for _ in range(_LARGE_REPEATS)]
    if place.is_main:
        say(latency_seconds=statistics.median(small), bytes_per_second=4 * _LARGE_VALUES / statistics.median(large))
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
