"""What is sent to MLflow: data sets by names that tell them apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.tracking.runs import DatasetInput, log_datasets

pytestmark = [pytest.mark.filterwarnings(f"ignore::{name}") for name in ("DeprecationWarning", "FutureWarning")]


def test_different_data_sets_of_one_name_have_different_names() -> None:
    sent: list[tuple[str, str]] = []

    def log_inputs(run_id: str, *, datasets: list[Any]) -> None:
        sent.extend((one.dataset.name, one.dataset.digest) for one in datasets)

    sets = [
        DatasetInput(name=name, source="s", digest=digest * 32, context=context)
        for name, digest, context in (
            ("a-train", "1", "train"),
            ("a-val", "2", "eval"),
            ("a-train", "3", "train"),
            ("a-train", "1", "eval more"),
        )
    ]
    log_datasets(SimpleNamespace(log_inputs=log_inputs), "run", sets)
    assert [name for name, _ in sent] == ["a-train", "a-val", "a-train-33333333", "a-train"]
    log_datasets(SimpleNamespace(log_inputs=log_inputs), "run", sets[:2])  # as before the second stage began
    assert {digest for _, digest in sent} == {one.digest for one in sets} and len(set(sent)) == 3
