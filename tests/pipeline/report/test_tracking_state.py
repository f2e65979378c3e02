import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.metrics_log import MetricRow
from pipeline.report.tracking_state import RunState, SentMark, load_run_state

STEPS = st.lists(st.integers(0, 6), max_size=12).map(sorted)


def rows_of(steps: list[int]) -> list[MetricRow]:
    return [MetricRow(step=step, images_seen=n, time=0.0, metrics={}) for n, step in enumerate(steps)]


@given(STEPS, st.data())
def test_sent_and_unsent_rows_make_up_the_file_wherever_the_sending_broke_off(
    steps: list[int], data: st.DataObject
) -> None:
    rows = rows_of(steps)
    broke_off = data.draw(st.integers(0, len(rows)))
    batch = data.draw(st.integers(1, 4))
    mark = SentMark()
    for start in range(0, broke_off, batch):
        mark = mark.after(rows[start : min(start + batch, broke_off)])
    assert list(mark.unsent(rows)) == rows[broke_off:]


@given(STEPS, st.integers(-1, 6), st.data())
def test_after_a_rollback_only_new_rows_are_unsent(steps: list[int], resume_step: int, data: st.DataObject) -> None:
    rows = rows_of(steps)
    sent = data.draw(st.integers(0, len(rows)))
    kept = [row for row in rows if row.step <= resume_step]
    again = rows_of([step for step in steps if step > resume_step])
    mark = SentMark().after(rows[:sent]).rewound(resume_step)
    assert list(mark.unsent([*kept, *again])) == [*kept[sent:], *again]


def test_a_state_reads_back(tmp_path: Path) -> None:
    state = RunState(tmp_path / "stage" / "mlflow.json", run_id="abc", attempt=3, sent=SentMark(7, 2))
    with pytest.raises(FileNotFoundError):  # the stage's folder is gone, and is not made again
        state.save()
    assert not state.file.parent.exists()
    state.file.parent.mkdir()
    state.save()
    assert load_run_state(state.file) == state
    assert [file.name for file in state.file.parent.iterdir()] == ["mlflow.json"]


def test_without_a_file_the_state_is_fresh_with_a_key_of_its_own(tmp_path: Path) -> None:
    first, second = (load_run_state(tmp_path / "mlflow.json") for _ in range(2))
    assert first.run_id is None
    assert first.key != second.key


@pytest.mark.parametrize("text", ["", "{", "[]", "null", json.dumps({"key": "k"})])
def test_a_damaged_state_is_a_value_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mlflow.json"
    file.write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011  (json's own message, or ours)
        load_run_state(file)
