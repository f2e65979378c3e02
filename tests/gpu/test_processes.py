"""Two processes train as one does: over NCCL on two GPUs, over gloo on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import processes_worker as worker
from tests.gpu.twenty_steps import STEPS, TOLERANCES, plain, recipe_for
from tests.workers import run_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def results(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cases came to, or why not. One start of the ranks serves all, and one more those after a failure."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    names, found, backend = [*worker.CASES], dict[str, Any](), ""
    while len(found) < len(names):
        out, why = tmp_path_factory.mktemp("two"), "no result"
        (out / "first").write_text(str(len(found)))
        try:
            run_ranks(Path(worker.__file__), out, world_size=2, accelerator=device.type)
        except AssertionError as error:
            why = str(error)
        if not (out / "results.pt").exists():  # they do not even start
            return {"backend": why, **dict.fromkeys(names, why), **found}
        written = torch.load(out / "results.pt", weights_only=False)
        backend, found = written["backend"], found | written["cases"]
        if len(found) < len(names):
            found[names[len(found)]] = why
    return {"backend": backend, **found}


def test_the_processes_talk_by_the_devices_library(results, device):
    assert results["backend"] == ("nccl" if device.type == "cuda" else "gloo")


@pytest.mark.parametrize("case", worker.CASES)
def test_20_steps_on_two_are_those_of_plain_torch_on_one(case, results, device, record_property):
    if isinstance(results[case], str):
        pytest.fail(results[case])
    rows, weights = results[case]
    recipe = recipe_for(worker.CASES[case])
    reference, most = plain(recipe), TOLERANCES[recipe.engine.precision]
    assert len(rows) == STEPS and all(applied for _, applied in rows)
    found = max(abs(loss - other) for (loss, _), other in zip(rows, reference.losses, strict=True))
    found /= reference.losses[0]
    record_property("difference", f"{found:.1e}, bound {most:.0e}")
    assert found <= most and weights.keys() == reference.weights.keys()
