"""Points at operations on files, found by their paths: whatever function it is that writes, renames or removes.

Files that are opened for writing at such a path strike in the middle of a write: half of the bytes are there already.
Opening goes through `open` (pathlib, shutil and torch.save use it too); what writes from C (safetensors, SQLite) does
not pass here.
"""

import builtins
import io
import os
import re
import sys
from typing import Any

from injected_faults.fault import planned, reach

_BESIDE = r"/checkpoints/\.writing-step-(?P<step>\d+)"
_WRITES = (
    ("save.manifest", re.compile(rf"{_BESIDE}/manifest\.json")),
    ("save.writing", re.compile(rf"{_BESIDE}/.")),
    ("model.writing", re.compile(r"/\.model\.writing/config\.json$")),  # the weights are there
    ("metrics.writing", re.compile(r"/metrics\.jsonl$")),
    ("record.writing", re.compile(r"/\.stage\.json\.writing$")),
    ("export.writing", re.compile(r"/\.?export[^/]*(\.writing|\.partial)?(/config\.json)?$")),
    ("pack.shard", re.compile(r"/\.[^/]+\.packing/.*\.tar$")),
)
_RENAMES = (
    ("save.{}_rename", re.compile(rf"{_BESIDE}$")),
    ("model.{}_rename", re.compile(r"/\.model\.writing$")),
    ("pack.{}_rename", re.compile(r"/\.[^/]+\.packing/result$")),
)
_PRUNED = re.compile(r"/checkpoints/\.?(?!writing)[a-z-]*step-(?P<step>\d+)")

POINTS = {
    *(point for point, _ in _WRITES),
    *(point.format(when) for point, _ in _RENAMES for when in ("before", "after")),
    "save.pruning",  # when one file of the old checkpoint is gone
}
_open = io.open
_rename, _replace = os.rename, os.replace


class _FaultyFile(io.FileIO):
    """A file that a fault strikes while a write is half done."""

    def __init__(self, file: Any, mode: str, *, point: str, step: int | None) -> None:
        super().__init__(file, mode)
        self._point, self._step, self._path = point, step, os.path.abspath(os.fspath(file))

    def write(self, data: Any) -> int:
        """Half, the fault, the rest."""
        for fault in planned():
            if fault.point == self._point and fault.is_due(step=self._step, path=self._path):
                view = memoryview(data).cast("B")
                half = len(view) // 2
                super().write(view[:half])
                fault.strike()
                return half + super().write(view[half:])
        return super().write(data)


def open_faulty(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """`open`, with files at the points' paths in `_FaultyFile`."""
    point, step = None, None
    if isinstance(file, str | os.PathLike) and set(mode) & set("wax+") and opener is None:
        point, step = _point_of(os.path.abspath(os.fspath(file)), _WRITES)
    if point is None or not any(fault.point == point for fault in planned()):
        return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    raw = _FaultyFile(file, mode.replace("b", "").replace("t", ""), point=point, step=step)
    if buffering == 0:
        return raw
    buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(
        raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    )
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


def install() -> None:
    """Replace `open`, `os.rename` and `os.replace`, and listen for the removal of folders."""
    builtins.open = io.open = open_faulty
    os.rename, os.replace = _around(_rename), _around(_replace)
    if any(fault.point == "save.pruning" for fault in planned()):
        sys.addaudithook(_Pruning())


def _around(rename: Any) -> Any:
    def renamed(src: Any, dst: Any, **folders: Any) -> None:
        point, step = _point_of(os.path.abspath(os.fspath(src)), _RENAMES)
        if point is None:
            return rename(src, dst, **folders)
        reach(point.format("before"), step=step, path=os.path.abspath(os.fspath(src)))
        rename(src, dst, **folders)
        reach(point.format("after"), step=step, path=os.path.abspath(os.fspath(dst)))

    return renamed


class _Pruning:
    """The second file of a checkpoint's folder is about to be removed."""

    def __init__(self) -> None:
        self._path, self._removed = "", 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "shutil.rmtree":
            path = os.path.abspath(os.fspath(args[0]))
            self._path, self._removed = path if _PRUNED.search(path) else "", 0
        elif event == "os.remove" and self._path:
            self._removed += 1
            if self._removed == 2:
                reach("save.pruning", step=_step_of(_PRUNED.search(self._path)), path=self._path)


def _point_of(path: str, table: tuple[tuple[str, re.Pattern[str]], ...]) -> tuple[str | None, int | None]:
    for point, pattern in table:
        if found := pattern.search(path):
            return point, _step_of(found)
    return None, None


def _step_of(found: re.Match[str] | None) -> int | None:
    text = None if found is None else found.groupdict().get("step")
    return None if text is None else int(text)
