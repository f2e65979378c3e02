"""Where images a second come from: anchors, an MFU, a measurement; and the processor that launches the kernels."""

import re

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.budget.communication import ZeroKind
from shardvit.pipeline.budget.forecast import GivenSpeed, Shards
from shardvit.pipeline.budget.gpus import GPUS, find_gpu, gpu_of_driver
from shardvit.pipeline.budget.speed import PASS_SECONDS, STEP_SECONDS, host_seconds, reading
from tests.conftest import ROOT
from tests.pipeline.budget.planning import forecast, recipe


def test_an_mfu_and_the_rate_it_comes_to_say_the_same():
    made = forecast(recipe("L/16", batch=256), given=GivenSpeed(mfu=0.4))
    assert made.time and made.time.speed.kind == "given"
    rate = made.time.speed.images_per_second
    assert rate == pytest.approx(0.4 * 989e12 / made.cost.training_flops)
    measured = forecast(
        recipe("L/16", batch=256),
        given=GivenSpeed(images_per_second=rate, measured_flops=made.cost.training_flops, measured_stage="pretrain"),
    )
    assert measured.time and measured.time.speed.mfu == pytest.approx(0.4)
    assert measured.time.speed.basis == "measured"


def test_a_rate_measured_in_another_stage_is_scaled_by_its_flops():
    given = GivenSpeed(images_per_second=1000, measured_flops=10**12, measured_stage="pretrain")
    made = forecast(recipe("L/16"), given=given, gpu=None)
    assert made.time and made.time.speed.mfu is None
    assert made.time.speed.images_per_second == pytest.approx(1000 * 10**12 / made.cost.training_flops)
    assert "pretrain" in made.time.speed.basis


def test_without_a_gpu_and_a_measurement_there_is_no_time_but_memory():
    made = forecast(recipe("L/16"), gpu=None)
    assert made.time is None and made.reading is None
    assert made.own.largest_micro_batch is None and made.own.peak_bytes["all"] > 10**9


def test_anchors_are_the_nearest_in_width_then_in_tokens():
    def basis(variant, size=224):
        made = forecast(recipe(variant, image_size=size, batch=64))
        assert made.time
        return made.time.speed.basis

    assert basis("L/16", 256) == "anchor L/16 at 224 px"
    assert basis("L/16", 512) == "anchor L/16 at 384 px"
    assert basis("G/14") == "anchor H/14 at 224 px"
    assert basis("S/32") == "anchor S/16 at 224 px"
    assert "guess" in basis("Ti/16") and "guess" in basis("R50x1") and "guess" in basis("R50+B/16")


def test_recomputing_is_no_work_and_takes_a_quarter_of_the_mfu():
    plain, recomputed = (
        forecast(recipe("L/16", batch=256, engine={"activation_checkpointing": each})).time for each in (False, True)
    )
    assert plain and recomputed
    assert recomputed.speed.images_per_second == pytest.approx(0.75 * plain.speed.images_per_second)
    assert recomputed.hours and plain.hours and recomputed.hours > plain.hours


def test_a_step_takes_at_least_what_the_processor_needs_to_launch_it():
    model = {"width": 64, "depth": 4, "heads": 2, "patch_size": 4}
    small = forecast(recipe(model, image_size=16, batch=64)).time
    assert small and small.step_seconds == small.host_seconds > 0
    large = forecast(recipe("L/16", batch=256)).time
    assert large and large.step_seconds > large.host_seconds
    assert host_seconds(24, zero_stage=3, passes=1) > 4 * host_seconds(24, zero_stage=1, passes=1)
    measured = forecast(recipe(model, image_size=16, batch=64), given=GivenSpeed(images_per_second=10**6)).time
    assert measured and measured.host_seconds == 0


def test_patches_that_come_back_at_the_end_cost_their_time():
    half = {"patch_dropout": 0.5}
    hours = [_hours({"unmasked_finish": each} | half) for each in ("0 steps", "50%", "99%")]
    assert 1.4 * hours[0] < hours[1] < hours[2] < 2.1 * hours[0]


def _hours(stage: dict[str, object]) -> float:
    time = forecast(recipe("L/16", batch=256, stage=stage)).time
    assert time and time.hours
    return time.hours


def test_gpus_are_found_by_the_names_that_drivers_give_them():
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-PCIE-40GB": "a100-40",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA GH200 480GB": "gh200",
        "Tesla V100-SXM2-32GB": "v100",
        "NVIDIA L40S": "l40s",
        "NVIDIA L4": "l4",
        "NVIDIA A10": "a10",
        "Tesla T4": "t4",
        "NVIDIA GeForce RTX 4090": "rtx4090",
    }
    found = {name: gpu.key if (gpu := gpu_of_driver(name)) else None for name in names}
    assert found == names
    assert gpu_of_driver("NVIDIA L40") is None and gpu_of_driver("Quadro K620") is None


def test_every_gpu_has_a_source_and_sensible_numbers():
    for gpu in GPUS:
        assert gpu.source.startswith("NVIDIA")
        assert gpu.fp16_tflops >= gpu.bf16_tflops and gpu.fp16_tflops > gpu.fp32_tflops > 0
        assert 0 < gpu.usable_bytes < gpu.memory_bytes
        assert find_gpu(gpu.key.upper()) is gpu
    assert find_gpu("t4").peak_flops("bf16") == find_gpu("t4").peak_flops("fp32")
    with pytest.raises(UserError, match=r"--gpu: h20 is not in the table .did you mean h200.*give one of b200"):
        find_gpu("h20")


def test_reading_is_the_benchmarks_at_its_own_images_and_grows_with_them():
    at_bench = reading(1000, image_bytes=107_000, image_size=224)
    assert at_bench.decode_ms == pytest.approx(1.27) and at_bench.cores == pytest.approx(1.27)
    assert at_bench.bytes_per_second == 107_000_000
    larger = reading(1000, image_bytes=214_000, image_size=384)
    assert larger.cores and larger.cores > 2 * 1.27
    unknown = reading(1000, image_bytes=None, image_size=224)
    assert (unknown.bytes_per_second, unknown.cores) == (None, at_bench.cores)
    assert unknown.assumed_image_bytes == 107_000 and at_bench.assumed_image_bytes is None
    assert reading(1000, image_bytes=None, image_size=22).cores < at_bench.cores / 50
    made = forecast(recipe("L/16"), gpus=8, shards=Shards(10**6, 1000, 100_000.0, 1000))
    assert made.reading and made.time
    assert made.reading.images_per_second == made.time.images_per_second


@pytest.mark.parametrize(
    ("row", "kind"), [("ZeRO 0, bf16", "ddp"), ("ZeRO 1, bf16", 1), ("ZeRO 2, bf16", 2), ("ZeRO 3, bf16", 3)]
)
def test_the_processors_part_is_the_benchmarks(row: str, kind: ZeroKind):
    """Of its record: after the name, operations, waits and bytes come the CPU milliseconds of passes and step."""
    record = (ROOT / "launch/bench/records/overhead.txt").read_text(encoding="utf-8")
    (line,) = (each for each in record.splitlines() if re.fullmatch(rf"{row}(\s+[\d.,]+){{10}}", each))
    passes, step = (float(word) for word in line.removeprefix(row).split()[5:7])
    assert (PASS_SECONDS[kind], STEP_SECONDS[kind]) == pytest.approx((passes / 1000, step / 1000))


def test_below_so_many_images_a_gpu_the_processor_is_the_bound():
    many = forecast(recipe("L/16", batch=256)).time
    assert many and 1 < many.host_bound_images < 256
    rate, host = many.speed.images_per_second, many.host_seconds
    assert many.host_bound_images - 1 < rate * host <= many.host_bound_images
    few = forecast(recipe("L/16", batch=many.host_bound_images // 2)).time
    assert few and few.step_seconds == few.host_seconds
    measured = forecast(recipe("L/16", batch=8), given=GivenSpeed(images_per_second=10**6)).time
    assert measured and measured.host_bound_images == 0
