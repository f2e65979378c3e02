"""A folder of all runs that was moved or copied: its database names the artifacts where they lay, and is made to name
those beside it, or whoever goes on in a copy would write into the original's folder."""

from __future__ import annotations

import fcntl
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from data_shards.durable import break_links, replaced

ARTIFACTS_FOLDER = "mlartifacts"  # of a folder of runs, beside its database
_PLACES = (  # in MLflow's tables
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)
_PATIENCE_SECONDS = 60.0  # with others that write to it


def follow_move(database: Path, *, home: Path) -> None:
    """Make `database`, the one of the folder `home`, name that folder's artifacts. What a hard-linked copy (`cp -rl`)
    shares with its original and MLflow writes in place becomes the copy's own. Raises OSError, sqlite3.Error."""
    moved = _elsewhere(database, home=home)
    if not moved:
        return
    with database.open("rb") as shared:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(shared, fcntl.LOCK_EX)  # of several processes that come this far, one at a time
        if database.stat().st_nlink > 1:
            own_file = replaced(database, sync="none", writers="several")
            with own_file as beside, _open(beside) as copy, _open(database) as original:
                original.backup(copy)  # whole, whoever writes to it
    for artifact in (home / ARTIFACTS_FOLDER).glob("*/artifacts/**/*"):  # models are never written again
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
    """The places of artifacts that are those of another folder of runs; by another path the same folder is none."""
    with _open(database) as known:
        places = [str(place) for (place,) in known.execute("select distinct artifact_location from experiments")]
    folders = {place: Path(unquote(urlsplit(place).path)) for place in places if place.startswith("file:")}
    ours = {place: folder.parent for place, folder in folders.items() if folder.name == ARTIFACTS_FOLDER}
    return [place for place, folder in ours.items() if not (folder.exists() and folder.samefile(home))]
