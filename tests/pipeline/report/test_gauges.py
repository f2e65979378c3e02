"""Speed, arithmetic and cost at a point of the curve, by a clock that the test sets and against figures by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from shardvit.model.counting.flops import account
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.report import gauges
from shardvit.pipeline.report.gauges import Gauges, ImageWork, peak_flops, stage_work

WORK = ImageWork((0, 10), (2 * 10**12, 3 * 10**12))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)  # stands where it is put
    monkeypatch.setattr(gauges, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_the_times_of_steps_leave_out_what_is_aside_and_begin_anew_at_each_point(clock: SimpleNamespace) -> None:
    one = Gauges(WORK, processes=1, peak=None, on_gpu=False)
    aside = 0.0
    for seconds in range(1, 101):  # of the steps, in any order
        clock.now += (seconds * 37) % 101
        if seconds % 10 == 0:
            clock.now += 1000.0
            aside += 1000.0
        one.step_done(aside_seconds=aside)
    found = one.read(step=100, images_per_second=1.0)
    assert [found[f"perf/step_seconds_{which}"] for which in ("p50", "p95", "max")] == [50.0, 95.0, 100.0]
    clock.now += 7.0
    one.step_done(aside_seconds=aside)
    found = one.read(step=101, images_per_second=1.0)
    assert [found[f"perf/step_seconds_{which}"] for which in ("p50", "p95", "max")] == [7.0, 7.0, 7.0]
    assert not any("step_seconds" in name for name in one.read(step=101, images_per_second=1.0))


def test_arithmetic_is_of_one_process_and_utilisation_only_where_the_peak_is_known(clock: SimpleNamespace) -> None:
    known = Gauges(WORK, processes=4, peak=5 * 10**12, on_gpu=False).read(step=10, images_per_second=4.0)
    assert known["perf/model_tflops_per_s"] == 2.0 and known["perf/mfu"] == 0.4
    later = Gauges(WORK, processes=4, peak=5 * 10**12, on_gpu=False).read(step=11, images_per_second=4.0)
    assert later["perf/model_tflops_per_s"] == 3.0
    unknown = Gauges(WORK, processes=4, peak=None, on_gpu=False).read(step=10, images_per_second=4.0)
    assert unknown["perf/model_tflops_per_s"] == 2.0 and "perf/mfu" not in unknown


def test_hours_are_of_all_attempts_and_processes_and_named_for_what_they_are(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges.torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    cpu, gpu = (Gauges(WORK, processes=8, peak=None, on_gpu=on_gpu, process_seconds=7200.0) for on_gpu in (False, True))
    clock.now += 450.0
    on_cpu, on_gpu = (each.read(step=1, images_per_second=1.0) for each in (cpu, gpu))
    assert on_cpu["perf/process_hours"] == on_gpu["perf/gpu_hours"] == 3.0
    assert on_gpu["perf/gpu_memory_peak_gib"] == 3.0
    assert not {"perf/gpu_hours", "perf/gpu_memory_peak_gib"} & on_cpu.keys() and "perf/process_hours" not in on_gpu
    assert 0.01 < on_cpu["perf/host_memory_peak_gib"] < 1000
    assert cpu.process_seconds == 10_800.0


@pytest.mark.parametrize(
    ("precision", "more", "name", "tflops"),
    [
        ("bf16", {}, "NVIDIA H100 80GB HBM3", 989.0),
        ("fp32", {}, "NVIDIA H100 80GB HBM3", 67.0),
        ("fp32", {"fp32_matmul": "tf32"}, "NVIDIA H100 80GB HBM3", None),
        ("bf16", {}, "Some GPU of tomorrow", None),
        ("bf16", {}, None, None),
    ],
)
def test_a_peak_is_that_of_the_precision(precision: Any, more: Any, name: str | None, tflops: float | None) -> None:
    found = peak_flops(EngineConfig(precision=precision, **more), gpu_name=name)
    assert found == (None if tflops is None else tflops * 10**12)


def test_work_follows_the_patches_that_are_left_out() -> None:
    recipe = load_recipe("digits", overrides=["pretrain.patch_dropout=0.5", "pretrain.unmasked_finish=25%"])
    plan = plan_stage(recipe, stage="pretrain", samples_per_epoch=64, world_size=1)
    work = stage_work(recipe, stage="pretrain", plan=plan, num_classes=10)
    half, whole = (
        account(recipe.model, image_size=16, num_classes=10, head="mlp", patch_dropout=share).training_flops
        for share in (0.5, 0.0)
    )
    assert 0 < plan.patch_dropout_steps < plan.total_steps
    assert work.of_image(plan.patch_dropout_steps) == half
    assert work.of_image(plan.patch_dropout_steps + 1) == whole > half
