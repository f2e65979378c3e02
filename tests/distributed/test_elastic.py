"""Another number of processes, another ZeRO stage: what continues is the saved state, and training follows its path."""

import importlib.util
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("elastic_worker.py")

_spec = importlib.util.spec_from_file_location("elastic_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
sys.modules["elastic_worker"] = worker  # dataclasses look their module up
_spec.loader.exec_module(worker)

SAME = [case for case in worker.READ if worker.has_native(case)]
# In bfloat16 another order of adding gradients up changes bits that are worth 1/256, from the first step on.
BF16_TOLERANCE = 0.02


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What all groups of processes computed: one start of them serves the whole module."""
    out = tmp_path_factory.mktemp("elastic")
    environment = {**os.environ, "PYTHONPATH": str(WORKER.parents[2]), "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=500)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    return {
        case: result
        for world in (1, 2, 3)
        for case, result in torch.load(out / f"world-{world}.pt", weights_only=False).items()
    }


def name_of(case):
    old = case.written
    return f"{old.backend} {old.precision} {old.optimizer}: {old.world}x ZeRO {old.stage} -> {case.world}x {case.stage}"


def both(results, case):
    return results[str(case.written)], results[str(case)]


def test_the_cases_cross_every_stage_both_ways_and_every_number_of_processes():
    """The list above is what the promise rests on."""
    stages = {(case.written.stage, case.stage) for case in worker.READ}
    assert stages == {(old, new) for old in range(4) for new in range(4)}
    sizes = {(case.written.world, case.world, case.written.precision) for case in worker.READ}
    counts = ((2, 1), (1, 2), (2, 3), (2, 2), (3, 3))
    assert sizes == {(*size, precision) for size in counts for precision in ("fp32", "bf16")}


@pytest.mark.parametrize("case", worker.READ, ids=name_of)
def test_weights_and_moments_are_the_writers_bit_for_bit(case, results):
    old, new = both(results, case)
    assert new["state"].keys() == old["state"].keys()
    for name, tensors in old["state"].items():
        assert tensors.keys() == new["state"][name].keys() > {"weight"}
        assert tensors.keys() == {"weight", *(worker.moments_of(case.written.optimizer) or set(tensors) - {"weight"})}
        for of, tensor in tensors.items():
            assert torch.equal(tensor, new["state"][name][of]), (name, of)
            assert tensor.abs().max() > 0, (name, of)


@pytest.mark.parametrize("case", worker.READ, ids=name_of)
def test_the_weights_that_compute_are_the_rounded_masters_before_the_first_step(case, results):
    _, new = both(results, case)
    dtype = torch.bfloat16 if case.written.precision == "bf16" else torch.float32
    for name, tensor in new["computing"].items():
        assert tensor.dtype == dtype
        exact = new["frozen"][name] if name in new["frozen"] else new["state"][name]["weight"]
        assert torch.equal(tensor, exact.to(dtype)), name


@pytest.mark.parametrize("case", worker.READ, ids=name_of)
def test_the_moving_average_is_the_writers_bit_for_bit_and_goes_on(case, results):
    old, new = both(results, case)
    assert new["averages"].keys() == old["averages"].keys() == old["state"].keys() | old["frozen"].keys()
    for name, tensor in old["averages"].items():
        assert torch.equal(tensor, new["averages"][name]), name
    trained = old["averages"].keys() - old["frozen"].keys()
    assert any(not torch.equal(old["averages"][name], old["state"][name]["weight"]) for name in trained)
    assert all(torch.equal(old["averages"][name], tensor) for name, tensor in old["frozen"].items())
    # As a whole: Adam blows up the rounding that is all there is of the keys' bias's gradient.
    flat = {
        name: torch.cat([tensor.flatten() for tensor in state.values()])
        for name, state in (
            ("then", old["averages"]),
            ("theirs", old["later averages"]),
            ("ours", new["later averages"]),
        )
    }
    moved = (flat["theirs"] - flat["then"]).norm()
    assert (flat["ours"] - flat["theirs"]).norm() < (0.3 if case.written.precision == "bf16" else 0.1) * moved


@pytest.mark.parametrize("case", worker.READ, ids=name_of)
def test_counters_go_on(case, results):
    old, new = both(results, case)
    both_keep = new["numbers"].keys() & old["numbers"].keys()  # ZeRO 0 keeps no counters of DeepSpeed's
    assert both_keep >= {"steps", "types"} and all(new["numbers"][key] == old["numbers"][key] for key in both_keep)
    assert ("torch.bfloat16" in dict(old["numbers"]["types"]).values()) == (
        case.written.optimizer.endswith("bf16") or case.written.optimizer == "adafactor"
    )
    assert new["numbers"]["steps"] == ([] if "sgd" in case.written.optimizer else [worker.STEPS_BEFORE])


@pytest.mark.parametrize("case", worker.READ, ids=name_of)
def test_each_group_keeps_its_own_weight_decay(case, results):
    decays = results[str(case)]["decays"]
    if case.written.optimizer in ("muon", "adamw frozen"):  # further groups, for other reasons
        assert set(decays) == {0.1, 0.0} and decays == sorted(decays, reverse=True)
    else:
        assert decays == [0.1, 0.0]


FROZEN = [case for case in worker.READ if case.written.optimizer == "adamw frozen"]


@pytest.mark.parametrize("case", FROZEN, ids=name_of)
def test_what_is_frozen_is_the_writers_to_the_last_bit_and_stays(case, results):
    """Its float32 values, though DeepSpeed keeps rounded ones; the reading engine began from others."""
    old, new = both(results, case)
    names = {name for name in new["computing"] if any(fnmatch(name, each) for each in ("pos_embed", worker.FROZEN[1]))}
    assert names == old["frozen"].keys() == new["frozen"].keys() and not names & new["state"].keys()
    start = dict(worker.common.build_model(worker.recipe_for(case.written, stage=0)).named_parameters())
    for name, tensor in old["frozen"].items():
        assert torch.equal(tensor, start[name] * 1.1)
        assert torch.equal(tensor, new["frozen"][name]) and torch.equal(tensor, new["weights"][name])


def test_frozen_parts_have_no_part_in_the_gradient_whatever_cuts_it(results):
    """The norm is clipped: did a stage count them, its losses would leave the others'."""
    first, *rest = (
        results[str(case)]["losses"] for case in {each.written for each in FROZEN} if case.precision == "fp32"
    )
    assert len(rest) == 2
    for losses in rest:
        assert losses == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("case", worker.READ, ids=name_of)
def test_the_next_losses_are_those_of_the_undisturbed_run(case, results):
    old, new = both(results, case)
    assert len(new["losses"]) == worker.STEPS_AFTER
    tolerance = {"abs": BF16_TOLERANCE} if case.written.precision == "bf16" else {"rel": 1e-5}
    assert new["losses"] == pytest.approx(old["losses"], **tolerance)
    change = max(abs(loss - old["losses"][0]) for loss in old["losses"])
    assert change > 3 * (BF16_TOLERANCE if case.written.precision == "bf16" else 1e-5), "it does not learn"


@pytest.mark.parametrize("case", SAME, ids=name_of)
def test_of_the_same_size_and_stage_loading_equals_deepspeeds_own(case, results):
    ours = results[str(case)]
    assert ours["losses"] == ours["native"]["losses"] == results[str(case.written)]["losses"]
    assert ours["weights"].keys() == ours["native"]["weights"].keys()
    for name, tensor in ours["native"]["weights"].items():
        assert torch.equal(tensor, ours["weights"][name]), name


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_state_of_another_model_is_refused_by_name_and_nothing_is_touched(stage, results):
    said = {name: text for (at, name), text in results["refusals"].items() if at == stage}
    assert "of another model than its recipe says: it lacks blocks.1." in said["lacks"]
    assert "it has pos_embed besides" in said["besides"]
    assert "cls_token is [1, 1, 16] instead of [1, 1, 32]" in said["instead"]
    assert all("\n" not in text for text in said.values())
    if stage:
        assert "has the shards of 2 processes instead of 3" in said["processes"]


def test_a_command_in_any_file_of_any_stage_is_refused_by_name_and_not_run(results):
    said = results["poisoned"]
    files = {stage: {name for at, name in said if at == stage} for stage in range(4)}
    assert [len(files[stage]) for stage in range(4)] == [2, 3, 3, 3]
    for (_, name), (text, ran) in said.items():
        assert not ran and name in text and "is not read" in text and "\n" not in text


def test_no_shared_memory_is_left_behind(results):
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
