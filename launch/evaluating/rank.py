"""One process of `shardvit eval --processes N`: reads the request, evaluates its part; the first writes the result.

    python -m launch.evaluating.rank FOLDER

FOLDER/request.json is what was asked. Exit codes: 0 done, 2 a user's mistake, which the first process says, 1 else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from data_shards.errors import SampleError, UserError
from launch.env import read_place
from launch.evaluating.exchanged import read_request, write_result
from launch.output import go_on, say
from pipeline.vocabulary import EXIT_USER_ERROR

_TIMEOUT_SECONDS = 24 * 3600.0  # the first process may index tars for hours


def main(folder: Path) -> int:
    """Returns the exit code."""
    go_on()
    place = read_place()
    try:
        request = read_request(folder)
        import torch

        from pipeline.evaluation.of_model import evaluate_model
        from pipeline.ranks.group import Ranks

        if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.world_size))
        ranks = Ranks(place, timeout_seconds=_TIMEOUT_SECONDS)
        result = evaluate_model(request, ranks=ranks, say=say if place.is_main else lambda text: None)
        if place.is_main:
            write_result(folder, result)
        ranks.leave()
    except UserError as error:
        if place.is_main or isinstance(error, SampleError):
            say(str(error))
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
