"""What it costs on a CPU to make the model's input of a batch: flip, normalise, mix; `pipeline.stage.task` and the plain way.

Run `python -m launch.bench.model_input`; records/model_input.txt has what it printed. The plain way is a pass over
memory for each operation, in the images' own layout, with the channels put first at the end. One thread; both take
turns in each round; median CPU microseconds an image, and the median over rounds of the ratio. The bits are compared
before anything is timed. A GPU was not measured.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from data_shards.loading.batch import Batch
from data_shards.loading.mixing import Mix
from data_shards.vocabulary import GOOGLES
from launch.bench.measure import median_ratio
from pipeline.stage.task import model_input

_CPU = torch.device("cpu")
_SIZES = ((224, 32), (32, 64), (8, 128))  # pixels a side, images
_VALUES = 5_000_000  # worked on in a turn


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description="What the model's input costs.")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, 1 thread, {rounds} rounds\n")
    print(f"{'CPU us an image':34}   plain    ours  ours/plain")
    for size, count in _SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            for mix in (None, Mix("mixup", keep=0.7)):
                batch = _batch(count, size=size, mix=mix)
                ways: dict[str, Callable[[], torch.Tensor]] = {
                    "plain": lambda batch=batch, dtype=dtype: _plain(batch, dtype=dtype),
                    "ours": lambda batch=batch, dtype=dtype: model_input(batch, device=_CPU, dtype=dtype),
                }
                if not torch.equal(ways["plain"](), ways["ours"]()):
                    raise AssertionError("the two ways differ")
                turns = max(3, _VALUES // batch.images.numel())
                spent: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(rounds):
                    for name, way in ways.items():
                        before = time.process_time()
                        for _ in range(turns):
                            way()
                        spent[name].append(1e6 * (time.process_time() - before) / turns / count)
                label = f"{size} px, {str(dtype).removeprefix('torch.')}{', mixup' if mix else ''}"
                plain, ours = (statistics.median(each) for each in spent.values())
                ratio = median_ratio(spent["ours"], spent["plain"])
                print(f"{label:34}{plain:8.1f}{ours:8.1f}{ratio:12.2f}", flush=True)


def _plain(batch: Batch, *, dtype: torch.dtype) -> torch.Tensor:
    pixels = batch.images.permute(0, 3, 1, 2)
    pixels = torch.where(batch.mirrored[:, None, None, None], pixels.flip(3), pixels)
    mean, std = (
        torch.tensor(each, dtype=torch.float64).mul(255).float()[:, None, None] for each in (GOOGLES.mean, GOOGLES.std)
    )
    values = (pixels.float() - mean) / std
    if batch.mix is not None:
        values = values[:-1] * batch.mix.keep + values[1:] * (1 - batch.mix.keep)
    return values.to(dtype).contiguous()


def _batch(count: int, *, size: int, mix: Mix | None) -> Batch:
    draw = torch.Generator().manual_seed(0)
    return Batch(
        images=torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=draw),
        mirrored=torch.rand(count, generator=draw) < 0.5,
        labels=torch.zeros(count, dtype=torch.int64),
        counted=torch.ones(count, dtype=torch.bool),
        substituted=torch.zeros(count, dtype=torch.bool),
        samples=torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.int64),
        keys=("",) * count,
        mix=mix,
    )


if __name__ == "__main__":
    main()
