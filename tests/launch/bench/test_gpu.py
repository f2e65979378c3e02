"""The GPU benchmark at a toy size on the CPU: contenders do the same work; the table says what was not measured."""

import copy
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.launch.bench import gpu
from shardvit.launch.bench.gpu_contenders import CONTENDERS
from shardvit.launch.bench.gpu_meter import Course, Meter, Ran, kind_of, split_kernels
from shardvit.launch.bench.gpu_report import GpuResults, Machine, report, rows_of, targets, void
from shardvit.launch.bench.gpu_work import SIZES

SHORT = {"blocks": 1, "block": 2, "singles": 1, "profiled": 1}
CPU = torch.device("cpu")


def outcome(contender: str, *, ms: float, losses: tuple[float, float] = (7.0, 6.0)) -> dict[str, Any]:
    return {
        "contender": contender,
        "size": "L/16@224 b256",
        "measured": {
            "block_ms": [ms, ms, 1.1 * ms],
            "losses": {"1": losses[0], "10": losses[1]},
            "first_step_seconds": 9.0,
            "phase_ms": {"forward": 1.0, "backward": 2.0, "optimizer": 0.5},
            "host_ms": 0.4,
            "peak_allocated_bytes": 10**10,
            "peak_reserved_bytes": 2 * 10**10,
            "split": {
                "shares": {"gemm": 0.7, "idle": 0.3},
                "kernels": 900.0,
                "busy_ms": 3.0,
                "attention_kernel": "fmha",
            },
        },
        "note": "",
        "failure": None,
        "graphs": 1,
        "graph_breaks": 0,
    }


def results(*outcomes: dict[str, Any]) -> GpuResults:
    return GpuResults(Machine("NVIDIA H200", {"torch": "2.15"}), None, list(outcomes))


def test_the_contenders_of_a_short_run_do_the_same_work(tmp_path: Path):
    turns = [gpu.Turn(what, "tiny", 300) for what in ("ceilings", "ours", "timm", "nobody")]
    run = gpu.run(turns, course=SHORT, out=tmp_path / "gpu.json", deadline=None)
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["outcomes"] == run.outcomes
    ours, timm = rows_of(run)
    assert (ours.contender, timm.contender) == ("ours", "timm")
    assert void(ours, bar=timm) is None
    assert timm.losses[1] < 0.95 * timm.losses[0]  # it learns: to agree means something
    assert "nobody" in run.outcomes[-1]["failure"]
    assert run.ceilings and run.ceilings["gemm_tflops"]["tiny"] > 0
    assert run.ceilings["attention"][0]["tflops"]["math"] and not run.ceilings["attention"][0]["tflops"]["cudnn"]
    text = "\n".join(report(run))
    assert "nobody" in text and "scaled_dot_product" in text


@pytest.mark.slow  # compiles four times
def test_every_contender_that_is_installed_agrees_with_the_bar(tmp_path: Path):
    run = gpu.run(gpu.TINY, course=SHORT, out=tmp_path / "gpu.json", deadline=None)
    rows = rows_of(run)
    assert {row.contender for row in rows} == set(CONTENDERS)
    assert [void(row, bar=rows[0]) for row in rows] == [None] * len(rows)
    notes = {row.contender: row.outcome["note"] for row in rows}
    assert notes["deepspeed"] == ""  # it was really DeepSpeed
    assert "2 processes" in notes["ours-2"] and "gloo" in notes["ours-2"]


STAND_IN = """
import json, os, sys, time
what, size, course, descriptor = sys.argv[1:5]
def mark(name, **values):
    os.write(int(descriptor), (json.dumps({"mark": name, "at": time.monotonic(), **values}) + "\\n").encode())
if what == "hangs":
    time.sleep(600)
mark("so far", result=json.loads(course) | {"contender": what})
if what == "breaks":
    sys.exit("RuntimeError: after its first block")
mark("end", result=json.loads(course) | {"contender": what, "note": "whole"})
"""


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders without torch, that give what they are given."""
    monkeypatch.setattr(gpu, "_gpu_name", lambda: "")
    monkeypatch.setattr(
        gpu,
        "_command",
        lambda turn, *, course: [gpu.sys.executable, "-c", STAND_IN, turn.what, turn.size, json.dumps(course)],
    )


@pytest.mark.usefixtures("stand_ins")
def test_a_turn_that_hangs_is_ended_and_one_that_breaks_keeps_what_it_measured(tmp_path: Path):
    turns = [gpu.Turn("hangs", "tiny", 0.3), gpu.Turn("breaks", "tiny", 300), gpu.Turn("runs", "tiny", 300)]
    run = gpu.run(turns, course=outcome("", ms=3.0), out=tmp_path / "gpu.json", deadline=None)
    hung, broken, whole = run.outcomes
    assert hung["measured"] is None and "0.3 s" in hung["failure"]
    assert [row.step_ms for row in rows_of(run)] == [3.0, 3.0]
    assert "after its first block" in broken["note"] and whole["note"] == "whole"
    assert "after its first block" in "\n".join(report(run))


@pytest.mark.usefixtures("stand_ins")
def test_after_the_deadline_no_turn_begins(tmp_path: Path):
    run = gpu.run([gpu.Turn("runs", "tiny", 300)], course={}, out=tmp_path / "gpu.json", deadline=time.monotonic() + 1)
    assert run.outcomes[0]["failure"].startswith("not run")


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, None])  # of its limit that each turn takes; None: a random one
@pytest.mark.parametrize("budget", [60.0, 300.0, 560.0, 900.0])
def test_the_turns_never_take_more_than_there_is_and_each_gets_what_it_needs(budget: float, share: float | None):
    left, draw = budget, random.Random(0)
    needed = sum(turn.least_seconds for turn in gpu.FULL)
    for number, turn in enumerate(gpu.FULL):
        limit = gpu.limit_seconds(turn, later=gpu.FULL[number + 1 :], left=left)
        assert limit <= left
        assert limit >= turn.least_seconds or budget < needed
        left -= limit * (draw.random() if share is None else share)


def test_the_full_plan_fits_its_minutes_from_cold_and_begins_with_what_matters():
    assert sum(turn.least_seconds for turn in gpu.FULL) <= 60 * gpu.MINUTES - gpu.END_SECONDS
    assert len(gpu.FULL) == 16
    whole = [turn for turn in gpu.FULL if turn.what != "ceilings"]
    assert {turn.what for turn in whole} == set(CONTENDERS)
    assert all(size in SIZES for turn in gpu.FULL for size in turn.size.split("+"))
    assert [turn.what for turn in gpu.FULL[:4]] == ["bar", "ours", "ceilings", "bar"]


@pytest.mark.parametrize(
    ("losses", "counts"),
    [((7.0, 6.0), True), ((7.05, 6.02), True), ((7.2, 6.2), False), ((7.0, 6.5), False), ((float("nan"), 6.0), False)],
)
def test_a_row_with_other_losses_is_void_and_enters_no_ratio(losses: tuple[float, float], counts: bool):
    made = results(outcome("bar", ms=100.0), outcome("ours", ms=101.0, losses=losses))
    bar, ours = rows_of(made)
    assert (void(ours, bar=bar) is None) is counts
    assert bool(targets([bar, ours], peak_flops=None)) is counts
    assert ("void" in "\n".join(report(made))) is not counts


def test_ratios_and_mfu_are_by_the_products_own_account():
    made = results(outcome("bar", ms=100.0), outcome("ours", ms=110.0), outcome("bar", ms=100.0))
    found = {target.what.split(": ")[1]: target for target in targets(rows_of(made), peak_flops=989e12)}
    assert found["images/s to bar's"].value == pytest.approx(1 / 1.1) and not found["images/s to bar's"].met
    assert found["peak memory to bar's"].met
    assert found["MFU"].value == pytest.approx(SIZES["L/16@224 b256"].account.training_flops * 256 / 0.110 / 989e12)
    text = "\n".join(report(made))
    assert "MISSED" in text and "idle 30.0%" in text and "by 0.0%" in text


def test_what_is_not_there_is_said_and_not_guessed():
    missing = {"contender": "trainer", "size": "L/16@224 b256", "measured": None, "failure": "not installed: x"}
    without_split = copy.deepcopy(outcome("bar", ms=100.0))
    without_split["measured"] |= {"split": None, "peak_allocated_bytes": None, "phase_ms": {}, "host_ms": None}
    text = "\n".join(report(GpuResults(Machine(None, {}), {"failure": "ended after 60 s"}, [without_split, missing])))
    assert "not installed: x" in text and "ceilings: ended after 60 s" in text and "no GPU" in text


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopB_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_kernel0_0", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata, FusedAdamMath>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copy"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("triton_per_fused_add_native_layer_norm_3", "elementwise"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::addmm", "gemm"),
    ],
)
def test_kernels_are_known_by_their_names(kernel: str, kind: str):
    assert kind_of(kernel) == kind


def test_time_that_kernels_share_counts_once_and_gaps_are_idle():
    split = split_kernels([Ran("gemm", 0, 40), Ran("gemm", 20, 60), Ran("fmha", 80, 100)], steps=2)
    assert split.shares["idle"] == pytest.approx(0.2)
    assert split.shares["gemm"] == pytest.approx(0.8 * 80 / 100) and sum(split.shares.values()) == pytest.approx(1)
    assert (split.kernels, split.attention_kernel) == (1.5, "fmha")


def test_the_meter_reads_two_losses_and_times_whole_blocks():
    blocks: list[int] = []
    course = Course(blocks=2, block=3, singles=2, profiled=0)
    meter = Meter(course, device=CPU, tell=lambda so_far: blocks.append(len(so_far.block_ms)))
    for step in range(1, meter.course.steps + 1):
        meter.begin()
        meter.phase_done()
        meter.phase_done()
        meter.end(torch.tensor(float(step)))
    found = meter.result()
    assert found.losses == {1: 1.0, 10: 10.0} and len(found.block_ms) == 2 and blocks == [1, 2]
    assert set(found.phase_ms) == {"forward", "backward", "optimizer"} and found.split is None


@pytest.mark.parametrize(("visible", "seen"), [(None, "0"), ("", ""), ("2,3", "2")])
def test_a_contender_sees_one_gpu(
    visible: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def run_told(command: Any, *, env: dict[str, str], **options: Any) -> SimpleNamespace:
        given.update(env)
        return SimpleNamespace(failure="it was not run", marks={})

    monkeypatch.setattr(gpu, "run_told", run_told)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    turn = gpu.Turn("trainer", "L/16@224 b256", least_seconds=1)
    gpu._take(turn, course=SHORT, folder=tmp_path, limit=1)
    assert given["CUDA_VISIBLE_DEVICES"] == seen
