"""Where the time goes that `launch.bench.data` measures: a profile of the transform alone, and of the imports.

    python -m launch.bench.data_profile FOLDER_OR_TAR

Shares of one process's time under cProfile, which weighs Python's own calls a little too much; page faults an image
without it. Imports: processor seconds of a fresh process for torch alone, and for the whole data path. Half a minute.
records/data_profile.txt has what it printed.
"""

from __future__ import annotations

import cProfile
import pstats
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_shards.images.crops import DRAWS_PER_SAMPLE
from data_shards.images.decode import read_image
from data_shards.order.randomness import uniforms
from launch.bench.data_fast import OURS
from launch.bench.data_prepare import read_photographs

_IMPORTS = {
    "torch": "import torch",
    "the data path": "from data_shards.loading.loader import TrainLoader; from data_shards.reading.opening import open_shards",
}
_PARTS = {"decode": "decoding (libjpeg-turbo, by nvImageCodec)", "aten.": "resize (torch)"}


def main() -> None:
    """Measure, print."""
    torch.set_num_threads(1)
    contents = read_photographs(Path(sys.argv[1])).contents
    draws = uniforms(2, np.arange(len(contents)), draws=DRAWS_PER_SAMPLE)
    into = np.empty((OURS.image_size, OURS.image_size, 3), dtype=np.uint8)

    def transform() -> None:
        for content, own in zip(contents, draws, strict=True):
            OURS(read_image(content), draws=own, into=into)

    transform()  # loads libraries
    faults, before = _page_faults(), time.process_time()
    transform()
    spent = time.process_time() - before
    each = 1000 * spent / len(contents)
    print(f"transform: {each:.2f} ms, {(_page_faults() - faults) / len(contents):.2f} page faults an image")
    with cProfile.Profile() as profile:
        transform()
    stats: Any = pstats.Stats(profile)
    own_times = {name: entry[2] for (_, _, name), entry in stats.stats.items()}
    rest = 1.0
    for part, label in _PARTS.items():
        share = sum(t for name, t in own_times.items() if "built-in" in name and part in name) / stats.total_tt
        print(f"  {share:4.0%} {label}")
        rest -= share
    print(f"  {rest:4.0%} Python, boxes, headers, views")
    for name, code in _IMPORTS.items():
        measured = f"import time; {code}; print(time.process_time())"
        seconds = min(float(subprocess.check_output([sys.executable, "-c", measured], text=True)) for _ in range(3))
        print(f"imports of {name}: {seconds:.2f} CPU s of a fresh process")


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    main()
