"""What the two exported programs (ONNX, torch.export) have in common: our record as text, and a file written wholly.

Costs nothing. The record is the one of `config.json` (`model.saved`), without the key around it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from torch import nn

from model.saved import SavedModelMeta


def record_text(meta: SavedModelMeta) -> str:
    """The record as JSON."""
    return meta.model_dump_json(exclude_none=True)


def parse_record(text: str | bytes | None, *, path: Path) -> SavedModelMeta:
    """The record that was found in `path`.

    Raises:
        ValueError: there was none, or it is not valid; the message names `path`.
    """
    if text is None:
        raise ValueError(f"{path} has no record of shardvit, which says what is fed to it: export it with shardvit")
    try:
        return SavedModelMeta.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path}: its record of shardvit is broken ({where}: {first['msg']}): export it again"
        ) from None


def check_request(path: Path, model: nn.Module, *, ending: str) -> None:
    """Refuse what would be exported wrongly.

    Raises:
        ValueError: `path` has another ending, by which nobody would know the format.
    """
    assert not model.training, "a model in training mode would be exported with its dropout"
    if path.suffix != ending:
        raise ValueError(f"{path}: the name of such a file must end in {ending}")


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Gives a path of the same name in a folder beside; when all is well, what was written there takes its place.

    It is flushed to disk before, so at `path` there is a whole file or what was there before. Where more files were
    written (weights of an ONNX model that are too large for it), an earlier `path` is removed first, so that it is
    never seen with weights that are not its own.
    """
    beside = path.with_name(f".{path.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)  # of an attempt that was killed
    beside.mkdir(parents=True)
    try:
        yield beside / path.name
        companions = sorted(file for file in beside.iterdir() if file.name != path.name)
        for file in (*companions, beside / path.name):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if companions:
            path.unlink(missing_ok=True)
        for file in (*companions, beside / path.name):
            file.replace(path.with_name(file.name))
    finally:
        shutil.rmtree(beside, ignore_errors=True)
