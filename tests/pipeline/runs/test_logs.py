import math
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runs.logs import MetricsLog, iter_metrics, read_metrics

VALUES = st.dictionaries(st.text(max_size=5), st.floats(allow_subnormal=True), max_size=4)
STEPS = st.lists(st.integers(0, 20), max_size=8).map(sorted)


def write(path: Path, steps: list[int]) -> None:
    with MetricsLog(path, resume_step=-1) as log:
        for step in steps:
            log.append(step=step, images_seen=64 * step, metrics={"loss": step / 3})


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("d", value)


@given(st.lists(VALUES, max_size=5))
def test_every_float_reads_back_to_the_same_bits(rows: list[dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with MetricsLog(path, resume_step=-1) as log:
            written = [log.append(step=n, images_seen=n, metrics=row) for n, row in enumerate(rows)]
        back = read_metrics(path)
    assert [(r.step, r.images_seen, r.time) for r in back] == [(r.step, r.images_seen, r.time) for r in written]
    for row, read in zip(rows, back, strict=True):
        assert {name: bits(value) for name, value in row.items()} == {n: bits(v) for n, v in read.metrics.items()}


@given(STEPS, st.integers(-1, 20))
def test_opening_keeps_the_rows_up_to_the_step_resumed_from(steps: list[int], resume_step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, steps)
        kept = [row for row in read_metrics(path) if row.step <= resume_step]
        with MetricsLog(path, resume_step=resume_step) as log:
            assert (log.kept_rows, log.dropped_broken_rows) == (len(kept), 0)
            new = log.append(step=99, images_seen=1, metrics={})
        assert read_metrics(path) == [*kept, new]
        assert [file.name for file in Path(folder).iterdir()] == ["metrics.jsonl"]


@given(STEPS, st.floats(0, 1))
def test_a_file_cut_anywhere_opens_with_every_row_that_is_whole(steps: list[int], share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, steps)
        rows, whole = read_metrics(path), path.read_bytes()
        cut = round(share * len(whole))
        path.write_bytes(whole[:cut])
        # A row whose newline alone is lost is whole.
        ends = [len(b"".join(whole.splitlines(True)[: n + 1])) - 1 for n in range(len(rows))]
        kept = [row for row, end in zip(rows, ends, strict=True) if end <= cut]
        assert read_metrics(path) == list(iter_metrics(path)) == kept
        with MetricsLog(path, resume_step=1000) as log:
            new = log.append(step=99, images_seen=1, metrics={"x": 1.0})
        assert read_metrics(path) == [*kept, new]


def test_what_is_left_whole_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    inode = path.stat().st_ino
    MetricsLog(path, resume_step=2).close()
    assert path.stat().st_ino == inode
    MetricsLog(path, resume_step=1).close()
    assert path.stat().st_ino != inode


@pytest.mark.parametrize(
    "line", [b"\0\0\0\n", b"[]\n", b'{"step": 1}\n', b'{"step": Infinity}\n', b"\xff\n", b'{"step": 1, "metrics": 3}\n']
)
def test_a_damaged_line_is_dropped_and_counted_on_opening_and_refused_on_reading(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + second)
    assert [row.step for row in iter_metrics(path)] == [1, 2]
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        read_metrics(path)
    with MetricsLog(path, resume_step=5) as log:
        assert log.dropped_broken_rows == 1
    assert [row.step for row in read_metrics(path)] == [1, 2]


def test_rows_are_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "stage" / "metrics.jsonl"
    with MetricsLog(path, resume_step=-1) as log:
        row = log.append(step=1, images_seen=2, metrics={"a": 0.1})
        assert read_metrics(path) == [row]


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []
