"""Replace files and folders atomically, once complete and flushed; `data_shards.durable` for `model`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a new folder; once the block succeeds, its file replaces `path`, atomically.

    If more files were written (weights too large for an ONNX file), an earlier `path` is removed first, so that it is
    never read with the wrong weights.
    """
    beside = path.with_name(f".{path.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)  # of an attempt that was killed
    beside.mkdir(parents=True)
    try:
        yield beside / path.name
        companions = sorted(file for file in beside.iterdir() if file.name != path.name)
        for file in (*companions, beside / path.name):
            _flush(file)
        if companions:
            path.unlink(missing_ok=True)
        for file in (*companions, beside / path.name):
            file.replace(path.with_name(file.name))
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder for flat files; once the block succeeds, it replaces `folder`.

    After a kill or power failure at any moment, `folder` is complete or absent. Between the two renames that replace an
    earlier one it is absent, and the next call first puts the earlier one back. Raises OSError if the disk is full or
    read-only; an earlier folder stays.
    """
    beside, aside = (folder.with_name(f".{folder.name}.{end}") for end in ("writing", "replaced"))
    if aside.exists() and not folder.exists():  # of an attempt that was killed
        aside.rename(folder)
    for leftover in (beside, aside):
        shutil.rmtree(leftover, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        for path in (*beside.iterdir(), beside):
            _flush(path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(aside)
    beside.rename(folder)
    for above in (folder.parent, folder.parent.parent):  # the latter may have got the former just now
        with suppress(PermissionError):  # a home's parent may be closed to its users
            _flush(above)
    shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
