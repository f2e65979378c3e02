"""One process of `shardvit eval --processes N`: read the request, evaluate a part; the first writes the result.

    python -m shardvit.launch.evaluation.rank FOLDER

Reads FOLDER/request.json. Exit codes: 0 done, 2 a user's mistake, which the first process reports, 1 anything else.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from shardvit.data_shards.errors import SampleError, UserError
from shardvit.data_shards.processes import num_cores
from shardvit.launch.local.env import omp_num_threads, read_place
from shardvit.launch.local.output import go_on, say
from shardvit.pipeline.evaluation.truth import EvalRequest, open_set
from shardvit.pipeline.recipe.vocabulary import EXIT_USER_ERROR

if TYPE_CHECKING:
    from shardvit.pipeline.evaluation.evaluate_file import ModelEvaluated

_REQUEST, _RESULT, _EVALUATION = "request.json", "result.json", "evaluation"
_TIMEOUT_SECONDS = 24 * 3600.0  # the first process may index tars for hours


def main(folder: Path) -> int:
    """Evaluate this process's part; returns the exit code."""
    go_on()
    place = read_place()
    try:
        request = read_request(folder)
        import torch

        from shardvit.pipeline.evaluation.evaluate_file import evaluate_model
        from shardvit.pipeline.ranks.group import Ranks
        from shardvit.pipeline.ranks.process import settle_threads

        if not torch.cuda.is_available():
            too_many = settle_threads(cores=num_cores() / place.world_size, asked=omp_num_threads())
            if too_many and place.is_main:
                say(too_many)
        ranks = Ranks(place, timeout_seconds=_TIMEOUT_SECONDS)
        opened = open_set(request, report=lambda line: None)  # the parent command has already reported
        result = evaluate_model(request, opened, ranks=ranks)
        if place.is_main:
            write_result(folder, result)
        ranks.leave()
    except UserError as error:
        if place.is_main or isinstance(error, SampleError):
            say(str(error))
        return EXIT_USER_ERROR
    return 0


def write_request(folder: Path, request: EvalRequest) -> None:
    """Write request.json."""
    (folder / _REQUEST).write_text(json.dumps(asdict(request), default=str), encoding="ascii")


def read_request(folder: Path) -> EvalRequest:
    """Read request.json."""
    return TypeAdapter(EvalRequest).validate_json((folder / _REQUEST).read_bytes())


def write_result(folder: Path, result: ModelEvaluated) -> None:
    """Write the result, in the first process; result.json comes last."""
    from shardvit.pipeline.runs.evaluations import write_evaluation

    write_evaluation(folder / _EVALUATION, result.evaluation)
    rest = {name: value for name, value in vars(result).items() if name != "evaluation"}
    damaged = [asdict(fault) for fault in result.damaged]
    (folder / _RESULT).write_text(json.dumps({**rest, "damaged": damaged}), encoding="ascii")


def read_result(folder: Path) -> ModelEvaluated:
    """Read the result that the first process wrote."""
    from shardvit.data_shards.loading.batch import Fault
    from shardvit.pipeline.evaluation.evaluate_file import ModelEvaluated
    from shardvit.pipeline.runs.evaluations import load_evaluation

    content = json.loads((folder / _RESULT).read_text(encoding="ascii"))
    content |= {"damaged": tuple(Fault(**each) for each in content["damaged"]), "notes": tuple(content["notes"])}
    return ModelEvaluated(evaluation=load_evaluation(folder / _EVALUATION), **content)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
