"""mlflow.json: read back, damaged, or of an earlier version; no passwords."""

import json
from pathlib import Path

import pytest

from shardvit.pipeline.tracking.facts import RunState, load_run_state, without_credentials


def test_a_state_reads_back(tmp_path: Path) -> None:
    state = RunState(tmp_path / "stage" / "mlflow.json", run_id="abc", attempt=3, sent_rows=9, sent={"facts": "1"})
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


def test_a_state_of_an_earlier_version_has_sent_nothing_but_rows(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.json"
    file.write_text(json.dumps({"key": "k", "run_id": "r", "attempt": 1, "sent_rows": 7}))
    state = load_run_state(file)
    assert (state.sent_rows, state.sent) == (7, {})
    state.point_to("r")
    assert state.sent_rows == 7
    state.point_to("another")
    assert (state.key, state.run_id, state.sent_rows) == ("k", "another", 0)


def test_credentials_are_taken_out_of_urls() -> None:
    assert without_credentials("see https://me:pw@host/x and s3://k@b") == "see https://***@host/x and s3://***@b"
    assert without_credentials("mail me@host, http://host/a@b") == "mail me@host, http://host/a@b"
