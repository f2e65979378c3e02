"""Open MLflow's client: import it late and quietly, create its SQLite store atomically, find the experiment.

Importing takes 2 to 4 s, creating a store 2 to 6 s. After a folder of runs was moved or copied, its database still
points at artifacts in the old place: paths are rewritten, or a copy would write into the original.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from shardvit.data_shards.durable import break_links, flush, replaced
from shardvit.data_shards.errors import UserError
from shardvit.pipeline.runs.run_folder import RunFolder

SQLITE = "sqlite:///"
MODEL_TRAINING = "workflowType=machine_learning"  # query string; MLflow 3 shows GenAI views otherwise
_EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # MLflow up to 3.6; later ones use the query string
    "mlflow.note.content": "A run for each pipeline of shardvit; its stages, with curves and pictures, are child runs.",
}
ARTIFACTS_FOLDER = "mlartifacts"  # next to mlflow.db
_PLACES = (  # columns of artifact paths
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)
_PATIENCE_SECONDS = 60.0  # wait for other writers
_STALE_SECONDS = 3600.0  # an unfinished database older than this is left from a kill


def store_uri(uri: str | None, *, home: Path) -> str:
    """Return the user's store, by default an SQLite file in the folder of all runs."""
    return uri or f"{SQLITE}{home / 'mlflow.db'}"


def home_of(folder: RunFolder) -> Path:
    """Return the folder of all runs, absolute."""
    sweep = folder.sweep
    return (folder.runs_root if sweep is None else sweep.parent).absolute()


def client_of(uri: str, *, home: Path) -> Any:
    """Open an existing store; `home`, the folder of all runs, may have been moved or copied."""
    _import_mlflow()
    from mlflow.tracking import MlflowClient

    database = Path(uri.removeprefix(SQLITE))
    if uri.startswith(SQLITE) and database.exists() and database.parent.samefile(home):
        follow_move(database, home=home)
    return MlflowClient(tracking_uri=uri)


def open_client(uri: str, *, home: Path, experiment: str) -> tuple[Any, str]:
    """Return a client and the experiment's id; creates both store and experiment if missing."""
    _import_mlflow()
    from mlflow.tracking import MlflowClient

    make_database(uri, create=lambda uri: MlflowClient(tracking_uri=uri).search_experiments(max_results=1))
    client = client_of(uri, home=home)
    found = client.get_experiment_by_name(experiment)
    if found is not None and found.lifecycle_stage == "deleted":
        again = f"bring it back with `mlflow experiments restore -x {found.experiment_id}`"
        raise UserError(f"experiment {experiment} was deleted: {again}, or name another (--experiment of sync)")
    if found is not None:
        for name, value in _EXPERIMENT_TAGS.items():
            if name not in found.tags:
                client.set_experiment_tag(found.experiment_id, name, value)
        return client, str(found.experiment_id)
    # Without a server, MLflow would put artifacts into ./mlruns of the working directory.
    location = (home / ARTIFACTS_FOLDER).as_uri() if uri.startswith("sqlite:") else None
    return client, str(client.create_experiment(experiment, artifact_location=location, tags=_EXPERIMENT_TAGS))


def make_database(uri: str, *, create: Callable[[str], object]) -> None:
    """Create a store's SQLite file atomically if missing: MLflow takes seconds and never repairs a half-made database,
    so `create` fills another file, which is then renamed. OSError if the disk is full or fails."""
    name = uri.removeprefix(SQLITE)
    if not uri.startswith(SQLITE) or not name or name.startswith((":", "file:")) or "?" in name or Path(name).exists():
        return
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.making-*"):
        with suppress(OSError):  # already gone
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()
    beside = path.with_name(f".{path.name}.making-{os.getpid()}")
    for leftover in (beside, beside.with_name(f"{beside.name}-journal")):  # PID reuse
        leftover.unlink(missing_ok=True)
    try:
        create(f"{SQLITE}{beside}")
        flush(beside)
        try:
            os.link(beside, path)
        except FileExistsError:
            pass  # another process was faster, and its runs are in its file
        except OSError:  # a file system without hard links
            beside.rename(path)
        flush(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _import_mlflow() -> None:
    import logging

    # MLflow reads these only from the environment; the user's values win. Its default seven retries block a call for
    # 246 s, and the sender has its own back-off. Telemetry is off.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow.tracking  # noqa: F401

    # Log lines on schemas and retries would break the progress bar; the sender reports failures.
    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)


def follow_move(database: Path, *, home: Path) -> None:
    """Point artifact paths in the database of `home` to `home` after a move or copy. Raises OSError, sqlite3.Error. A
    hard-linked copy (`cp -rl`) gets its own database and artifacts, which MLflow writes in place."""
    moved = _elsewhere(database, home=home)
    if not moved:
        return
    with database.open("rb") as shared:
        with suppress(OSError):  # no locks on this file system
            fcntl.flock(shared, fcntl.LOCK_EX)  # one process at a time
        if database.stat().st_nlink > 1:
            own_file = replaced(database, sync="none", writers="several")
            with own_file as beside, _open(beside) as copy, _open(database) as original:
                original.backup(copy)  # consistent despite other writers
    for artifact in (home / ARTIFACTS_FOLDER).glob("*/artifacts/**/*"):  # not models, which are never rewritten
        if artifact.is_file() and not artifact.is_symlink():
            break_links(artifact)
    with _open(database) as own, own:
        for old in moved:
            for table, column in _PLACES:
                own.execute(
                    f"update {table} set {column} = ? || substr({column}, ?) where substr({column}, 1, ?) = ?",
                    ((home / ARTIFACTS_FOLDER).as_uri(), len(old) + 1, len(old), old),
                )


def _open(database: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(database, timeout=_PATIENCE_SECONDS))


def _elsewhere(database: Path, *, home: Path) -> list[str]:
    """List artifact locations in another folder of runs; the same folder by another path does not count."""
    with _open(database) as known:
        places = [str(place) for (place,) in known.execute("select distinct artifact_location from experiments")]
    folders = {place: Path(unquote(urlsplit(place).path)) for place in places if place.startswith("file:")}
    ours = {place: folder.parent for place, folder in folders.items() if folder.name == ARTIFACTS_FOLDER}
    return [place for place, folder in ours.items() if not (folder.exists() and folder.samefile(home))]
