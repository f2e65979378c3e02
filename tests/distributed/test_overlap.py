"""Two processes whose collectives arrive as late as they may: no kind of model reads what has not arrived."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers import run_ranks

WORKER = Path(__file__).with_name("overlap_worker.py")
_spec = importlib.util.spec_from_file_location("overlap_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    out = tmp_path_factory.mktemp("overlap")
    run_ranks(WORKER, out, world_size=2)
    return torch.load(out / "results.pt", weights_only=False)


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_training_is_the_same_to_the_last_bit_however_late_collectives_are(case: Any, results: dict[Any, Any]) -> None:
    plain, late = results[case]["plain"], results[case]["late"]
    assert late["losses"] == plain["losses"] and all(loss == loss for loss in late["losses"])
    for name, tensor in plain["weights"].items():
        assert torch.equal(tensor, late["weights"][name]), name
    assert late["buckets"] > 1 and late["hooks"] == 0


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_a_forward_pass_of_a_vit_begins_before_all_weights_have_arrived(case: Any, results: dict[Any, Any]) -> None:
    passes = worker.STEPS - 1  # the first has nothing to wait for
    assert results[case]["late"]["begun early"] == (0 if case[0] == "resnet" else passes)


def test_a_gradient_in_two_parts_is_refused_where_it_would_be_sent_too_early(results: dict[Any, Any]) -> None:
    assert "engine.overlap" in results["twice"]["on"] and not results["twice"]["off"]
