"""What `shardvit eval` and its processes hand to one another: a folder with the request and, at the end, the result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.evaluation.request import EvalRequest

if TYPE_CHECKING:
    from pipeline.evaluation.evaluate_file import ModelEvaluated

_REQUEST, _RESULT, _EVALUATION = "request.json", "result.json", "evaluation"


def write_request(folder: Path, request: EvalRequest) -> None:
    """For the processes."""
    (folder / _REQUEST).write_text(json.dumps(asdict(request)), encoding="ascii")


def read_request(folder: Path) -> EvalRequest:
    """What was asked."""
    content = json.loads((folder / _REQUEST).read_text(encoding="ascii"))
    metrics = content["metrics"]
    return EvalRequest(**{**content, "metrics": metrics if metrics == "auto" else tuple(metrics)})


def write_result(folder: Path, result: ModelEvaluated) -> None:
    """By the first process; result.json is the last file."""
    from pipeline.runs.evaluations import write_evaluation

    write_evaluation(folder / _EVALUATION, result.evaluation)
    rest = {name: value for name, value in vars(result).items() if name != "evaluation"}
    damaged = [asdict(fault) for fault in result.damaged]
    (folder / _RESULT).write_text(json.dumps({**rest, "damaged": damaged}), encoding="ascii")


def read_result(folder: Path) -> ModelEvaluated:
    """What `write_result` was given."""
    from data_shards.loading.batch import Fault
    from pipeline.evaluation.evaluate_file import ModelEvaluated
    from pipeline.runs.evaluations import load_evaluation

    content = json.loads((folder / _RESULT).read_text(encoding="ascii"))
    content |= {"damaged": tuple(Fault(**each) for each in content["damaged"]), "notes": tuple(content["notes"])}
    return ModelEvaluated(evaluation=load_evaluation(folder / _EVALUATION), **content)
