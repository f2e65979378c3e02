"""The moving average of the weights in two real processes, under every ZeRO stage, precision and backend."""

import importlib.util
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.whole_weights import assemble
from tests.workers import run_ranks

WORKER = Path(__file__).with_name("average_worker.py")
WORLD_SIZE = 2

_spec = importlib.util.spec_from_file_location("average_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the two ranks computed, for all cases: one start of the processes serves the whole module."""
    out = tmp_path_factory.mktemp("average")
    run_ranks(WORKER, out, world_size=WORLD_SIZE)
    return torch.load(out / "results.pt", weights_only=False) | {"folder": out}


def worst(left, right):
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_fifty_steps_are_plain_torchs_average_of_the_float32_weights_and_a_skipped_one_moves_nothing(case, results):
    ours = results[case]
    assert [row["applied"] for row in ours["rows"]].index(False) == worker.SKIPPED
    assert sum(row["applied"] for row in ours["rows"]) == worker.STEPS - 1
    assert worst(ours["average"][1], ours["plain"]) < 1e-6
    assert worst(ours["average"][1], ours["weights"]) > 1e-5, "it is no average"


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_what_is_evaluated_is_the_average(case, results):
    predicted, weights = results[case]["average"]
    model = worker.common.build_model(worker.common.recipe_for(*case))
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model.eval()(worker.common.batch(0)[0])
    assert (predicted - expected).abs().max() < (1e-5 if case[2] == "fp32" else 0.2)
    dtype = torch.bfloat16 if case[2] == "bf16" else torch.float32
    for name, tensor in results[case]["computing"].items():
        assert torch.equal(tensor, weights[name].to(dtype)), name


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_training_is_the_same_to_the_last_bit_without_average_and_evaluations(case, results):
    """Of the evaluations one is left by an exception."""
    ours = results[case]
    assert ours["rows"][: worker.SKIPPED] == ours["quiet_rows"][: worker.SKIPPED]
    assert ours["rows"][worker.SKIPPED + 1 :] == ours["quiet_rows"][worker.SKIPPED + 1 :]
    assert worst(ours["weights"], ours["quiet_weights"]) == 0


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_resuming_equals_never_having_stopped_to_the_last_bit(case, results):
    ours = results[case]
    assert worst(ours["saved"], ours["restored"]) == 0
    assert worst(ours["saved"], ours["average"][1]) > 0
    assert ours["resumed_rows"] == ours["rows"][worker.SAVED :]
    assert worst(ours["resumed_weights"], ours["weights"]) == 0
    assert worst(ours["resumed_average"][1], ours["average"][1]) == 0
    assert torch.equal(ours["resumed_average"][0], ours["average"][0])


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_the_average_in_a_saved_state_is_found_without_its_processes(case, results):
    with torch.device("meta"):
        model = worker.common.placeholder(worker.common.recipe_for(*case))
    folder = results["folder"] / "-".join(map(str, case))
    found = assemble(folder, backend=case[0], zero_stage=case[1], processes=WORLD_SIZE, model=model, of="ema")
    assert worst(found, results[case]["saved"]) == 0
    trained = assemble(folder, backend=case[0], zero_stage=case[1], processes=WORLD_SIZE, model=model)
    assert worst(found, trained) > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_process_saves_its_own_part_of_the_average(stage, results):
    """4 bytes a parameter over all processes, as of a moment."""
    files = sorted((results["folder"] / f"deepspeed-{stage}-fp32").rglob("average_rank_*.pt"))
    assert len(files) == (WORLD_SIZE if stage else 1)
    held = [torch.load(file)["averages"].values() for file in files]
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in held]
    number = sum(parameter.numel() for parameter in results["deepspeed", stage, "fp32"]["weights"].values())
    assert number <= sum(counts) <= number + 64  # padding
    assert max(counts) - min(counts) <= 32
