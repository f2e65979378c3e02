"""What a run leaves, said once for the fast and the slow tests: its files, and its runs in MLflow."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path

_STAGES = ("masked_patch", "pretrain", "swap_head", "finetune")
# Of a run or not by how it was started: overrides on the command line, SHARDVIT_PICTURES, no server, SLURM.
BY_THE_START = ("recipe_difference.txt", "pictures.log", "*/pictures/*", "report.html", "tracking/*", "slurm/*")
_OF_A_RUN = (
    *(".run.lock*", ".train.lock*", "recipe.yaml"),
    "mlflow.json",
)
_OF_A_STAGE = (
    *("stage.json", "data.json", "metrics.jsonl", "events.jsonl", "evaluations/*/step-*/*", "ranks/*.json"),
    *("mlflow.json", "mlflow_facts.json", "model/config.json", "model/model.safetensors"),
    *("checkpoints/step-*/manifest.json", "checkpoints/step-*/recipe.yaml", "checkpoints/step-*/state.json"),
    *("checkpoints/step-*/deepspeed/*.pt", "checkpoints/step-*/*.pt"),
)
_PATTERNS = (*BY_THE_START, *_OF_A_RUN, *(f"{stage}/{name}" for stage in _STAGES for name in _OF_A_STAGE))


def surprises(run: Path) -> list[str]:
    """Files of a finished run's folder that no run is known to leave."""
    files = (str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir())
    return sorted(name for name in files if not matches(name, _PATTERNS))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path within a run's folder is one of them; `*` stands for folders, too."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def mlflow_states(database: Path) -> dict[str, list[str]]:
    """The states of MLflow's runs by the stage that they are of; "": a whole pipeline's."""
    found: dict[str, list[str]] = {}
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT runs.status, tags.value FROM runs LEFT JOIN tags "
            "ON tags.run_uuid = runs.run_uuid AND tags.key = 'shardvit.stage' ORDER BY runs.start_time"
        )
        for state, stage in rows:
            found.setdefault(stage or "", []).append(state)
    return found
