"""Two real processes under every ZeRO stage, precision and backend; that training is plain torch's: `test_equality`."""

import importlib.util
from pathlib import Path

import pytest
import torch

from shardvit.model.saved.model_folder import SavedModelMeta, build_from_saved, save_model
from shardvit.pipeline.checkpoint.store import assemble
from tests.workers import run_ranks

WORKER = Path(__file__).with_name("engine_worker.py")
WORLD_SIZE = 2

_spec = importlib.util.spec_from_file_location("engine_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)

BF16 = [case for case in worker.CASES if case[2] == "bf16"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the two ranks computed, for all cases: one start of the processes serves the whole module."""
    out = tmp_path_factory.mktemp("engines")
    run_ranks(WORKER, out, world_size=WORLD_SIZE)
    return torch.load(out / "results.pt", weights_only=False) | {"folder": out}


def plain_training(recipe, *, steps, lr):
    model = worker.build_model(recipe)
    kernels = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    others = [p for p in model.parameters() if all(p is not kernel for kernel in kernels)]
    optimizer = torch.optim.AdamW(
        [{"params": kernels, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    rows, saved = [], {}
    for step in range(steps):
        if step == worker.STEPS // 2:
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        images, labels = worker.batch(step)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
        rows.append({"loss": loss.item(), "grad_norm": grad_norm.item()})
    return {"rows": rows, "saved": saved, "weights": model.state_dict()}


def without_key_bias(weights):
    """Softmax ignores a bias of the keys: its true gradient is zero, and Adam blows up the rounding that is left."""
    kept = dict(weights)
    for name, tensor in weights.items():
        if name.endswith("attn.qkv.bias"):
            query, _, value = tensor.chunk(3)
            kept[name] = torch.cat([query, value])
        if name == "attn_pool.kv.bias":
            _, kept[name] = tensor.chunk(2)
    return kept


def losses(rows):
    return [row["loss"] for row in rows]


def worst_difference(left, right):
    assert left.keys() == right.keys()
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_training_starts_from_the_exact_float32_weights(case, results):
    model = worker.build_model(worker.recipe_for(*case))
    assert worst_difference(results[case]["at_start"], model.state_dict()) == 0


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bfloat16_keeps_float32_master_weights(case, results):
    weights = results[case]["weights"]
    rounded = {name: tensor.to(torch.bfloat16).float() for name, tensor in weights.items()}
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert worst_difference(weights, rounded) > 0


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_predictions_are_those_of_the_consolidated_weights(case, results):
    model = worker.build_model(worker.recipe_for(*case))
    model.load_state_dict(results[case]["weights"])
    with torch.no_grad():
        expected = model.eval()(worker.batch(0)[0])
    tolerance = 1e-4 if case[2] == "fp32" else 0.1
    assert (results[case]["predicted"] - expected).abs().max() < tolerance


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_the_average_is_plain_torchs_of_the_float32_weights_and_a_skipped_step_moves_it_not(case, results):
    ours = results[case]
    assert worst_difference(ours["average"][1], ours["plain average"]) < 1e-6
    assert worst_difference(ours["average"][1], ours["weights"]) > 1e-4, "it is no average"
    assert worst_difference(ours["average"][1], ours["average after poison"]) == 0


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_what_is_evaluated_is_the_average(case, results):
    predicted, weights = results[case]["average"]
    model = worker.build_model(worker.recipe_for(*case))
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model.eval()(worker.batch(0)[0])
    assert (predicted - expected).abs().max() < (1e-5 if case[2] == "fp32" else 0.2)
    dtype = torch.bfloat16 if case[2] == "bf16" else torch.float32
    for name, tensor in results[case]["computing"].items():
        assert torch.equal(tensor, weights[name].to(dtype)), name


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


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_restoring_gives_back_the_saved_weights_bit_for_bit(case, results):
    assert worst_difference(results[case]["saved"], results[case]["restored"]) == 0
    assert worst_difference(results[case]["saved"], results[case]["weights"]) > 0


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_resuming_equals_never_having_stopped_also_without_an_average_and_its_evaluations(case, results):
    """To the last bit; of the evaluations one is left by an exception."""
    ours = results[case]
    assert ours["resumed_rows"] == ours["rows"][worker.STEPS // 2 :]
    assert worst_difference(ours["resumed_weights"], ours["weights"]) == 0


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_the_norm_of_the_weights_and_of_a_steps_change_are_those_of_the_whole_weights(case, results):
    (skipped, weights), (measured, expected), (nothing, _) = results[case]["measured"]
    assert skipped == pytest.approx({"opt/parameter_norm": weights["opt/parameter_norm"], "opt/update_ratio": 0.0})
    assert measured == pytest.approx(expected, rel=1e-5) and measured["opt/update_ratio"] > 1e-4
    assert nothing == {}


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_a_step_and_a_restore_wait_for_the_snapshot_before_they_change_what_it_shares(case, results):
    for held in results[case]["held"].values():
        assert held == {"whole when waited for": True, "changed after": True}


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_weight_decay_of_the_groups_survives_a_restore(case, results):
    assert results[case]["decays"] == [0.1, 0.0]


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_a_flag_that_one_rank_raises_all_see_in_the_same_step(case, results):
    heard = results["heard"][case]
    assert len(heard) == 6 and all(got == wanted for got, wanted in heard)


def test_no_shared_memory_is_left_behind(results):
    assert not list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


@pytest.mark.parametrize("case", worker.CASES, ids=str)
def test_the_weights_in_a_saved_state_are_found_without_its_processes(results, case):
    """Whole, in float32, equal to the last bit, from the shards of every ZeRO stage."""
    recipe = worker.recipe_for(*case)
    with torch.device("meta"):
        model = worker.placeholder(recipe)
    folder = results["folder"] / "-".join(map(str, case))
    found = assemble(folder, written={"backend": case[0], "zero_stage": case[1], "processes": WORLD_SIZE}, model=model)
    saved = results[case]["saved"]
    assert worst_difference(found, saved) == 0
    average = assemble(
        folder, written={"backend": case[0], "zero_stage": case[1], "processes": WORLD_SIZE}, model=model, of="ema"
    )
    assert worst_difference(average, results[case]["saved average"]) == 0 and worst_difference(average, saved) > 0
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


@pytest.fixture(scope="module")
def kind_oracles():
    return {
        kind: plain_training(
            worker.recipe_for("deepspeed", 0, "fp32", model=model), steps=worker.KIND_STEPS, lr=worker.kind_lr
        )
        for kind, model in worker.KINDS.items()
    }


@pytest.mark.parametrize("case", worker.KIND_CASES, ids=str)
def test_every_kind_of_model_trains_as_in_plain_torch(case, results, kind_oracles):
    """Sharded weights are gathered when a module is called: one that reads another's weights would see none."""
    kind, _, precision = case
    ours, theirs = results[case], kind_oracles[kind]
    tolerance = {"rel": 1e-4} if precision == "fp32" else {"abs": 0.2}
    assert losses(ours["rows"]) == pytest.approx(losses(theirs["rows"]), **tolerance)
    change = worst_difference(without_key_bias(ours["weights"]), without_key_bias(theirs["weights"]))
    assert change < (2e-4 if precision == "fp32" else 3 * 2 * worker.kind_lr(0))
    start = worker.build_model(worker.recipe_for("deepspeed", 0, "fp32", model=worker.KINDS[kind])).state_dict()
    assert worst_difference(ours["weights"], start) > worker.kind_lr(0)


@pytest.mark.parametrize("case", worker.KIND_CASES, ids=str)
def test_every_kind_of_model_is_saved_whole(case, results, tmp_path):
    """The stage's model answers as the engine did, and the checkpoint's shards make up the same weights."""
    kind, stage, precision = case
    recipe = worker.recipe_for("deepspeed", stage, precision, model=worker.KINDS[kind])
    names = tuple(map(str, range(worker.CLASSES)))
    meta = SavedModelMeta(
        model=recipe.model, image_size=worker.SIZE, num_classes=worker.CLASSES, class_names=names, head="linear"
    )
    weights = results[case]["weights"]
    save_model(tmp_path / "model", weights, meta=meta)
    _, model = build_from_saved(tmp_path / "model")
    with torch.no_grad():
        expected = model.eval()(worker.batch(0)[0])
    assert (results[case]["predicted"] - expected).abs().max() < (1e-4 if precision == "fp32" else 0.25)

    with torch.device("meta"):
        empty = worker.placeholder(recipe)
    folder = results["folder"] / "-".join(map(str, case))
    found = assemble(
        folder, written={"backend": "deepspeed", "zero_stage": stage, "processes": WORLD_SIZE}, model=empty
    )
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
