"""Check output files and folders by one rule, before any work.

An existing one is replaced if the same command wrote it, or with --force. Nothing is written into a run but a command's
own place in it, and never to a device, FIFO, socket or symbolic link.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from data_shards.durable import replace_text
from data_shards.errors import UserError
from launch.flags import switch
from pipeline.recipe.vocabulary import ALL_STAGES, RECIPE_FILE, STAGE_FILE

Force = Annotated[bool, switch("Replace what is there, whatever wrote it.", "--force")]
JsonFile = Annotated[
    Path | None,
    Parameter(
        name="--json", allow_leading_hyphen=True, help="Write the result as JSON, too; -: to standard output, alone."
    ),
]
PageCommand = Literal["report", "show", "figures", "check", "pack"]
INDEX_FILE = "index.html"  # of a folder that is a page
_MOST_BYTES = 2**26  # no result of ours is as large
_STDOUT = Path("-")


def demand_target(
    path: Path | None, *, flag: str, force: bool, mark: str = "", file: str = "", own_place: Path | None = None
) -> None:
    """Raise UserError, which names `flag`, if `path` must not be written. `mark`: text in every output of the same
    command (for a folder, in its `file`); empty: replacing needs --force. `own_place`: the command's in a run."""
    if path in (None, _STDOUT):
        return
    if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
        raise UserError(f"{flag} {path}: it is a link or a device, which is not written to: give another place")
    place = Path(os.path.realpath(path))
    if own_place is not None and place == Path(os.path.realpath(own_place)):
        return
    if (run := next(filter(_is_run, (place, *place.parents)), None)) is not None:
        raise UserError(f"{flag} {path}: it lies in the run {run}, which has its own files: give another place")
    marked = path / file if path.is_dir() else path
    try:
        is_small = marked.is_file() and marked.stat().st_size < _MOST_BYTES
        is_ours = mark and is_small and mark.encode() in marked.read_bytes()
        is_taken = path.is_file() or (path.is_dir() and any(path.iterdir()))
    except OSError as error:
        raise UserError(f"{flag} {path}: it cannot be read ({error.strerror}): give another place") from None
    if is_taken and not (force or is_ours):
        why = "this command did not write it" if mark else "it may be another model"
        raise UserError(f"{flag} {path}: it exists, and {why}: give another place, or --force")


def page_mark(command: PageCommand) -> str:
    """Return the end of a page that the command wrote."""
    return f"<!-- written by shardvit {command} -->\n"


def tell_result(shown: str, *, as_json: str, json_file: Path | None) -> None:
    """Print a result, or only its JSON, and write that to `json_file`. UserError: it cannot be written."""
    print(as_json if json_file == _STDOUT else shown, flush=True)
    if json_file not in (None, _STDOUT):
        try:
            replace_text(json_file, f"{as_json}\n", sync="none")
        except OSError as error:
            raise UserError(f"--json {json_file}: it cannot be written ({error.strerror})") from None


def _is_run(folder: Path) -> bool:
    begun = any((folder / name / STAGE_FILE).exists() for name in ALL_STAGES)
    return begun or ((folder / RECIPE_FILE).exists() and any(folder.glob(".*.lock")))
