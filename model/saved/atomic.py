"""Replace files and folders atomically, once complete and flushed; `data_shards.durable` for `model`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a new folder; if the block succeeds, its file replaces `path` atomically. If it
    wrote more files (large ONNX weights), an earlier `path` is removed first, so it never gets the wrong weights."""
    beside = path.with_name(f".{path.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)  # left by a killed attempt
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
    """Yield a new folder for flat files; if the block succeeds, it replaces `folder`. After a kill or power failure
    `folder` is complete, or absent until the next call restores it. OSError if the disk fails; the old one stays."""
    beside, aside = (folder.with_name(f".{folder.name}.{end}") for end in ("writing", "replaced"))
    if aside.exists() and not folder.exists():  # left by a killed attempt
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
    for above in (folder.parent, folder.parent.parent):  # the latter may just have created the former
        with suppress(PermissionError):  # users may be unable to read a home's parent
            _flush(above)
    shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
