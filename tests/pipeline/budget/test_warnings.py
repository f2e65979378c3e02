"""The warnings: each appears where it should, says what to change, and is gone once that is done."""

import re

import pytest

from shardvit.pipeline.budget.communication import links_of
from shardvit.pipeline.budget.forecast import Hardware, Shards
from shardvit.pipeline.budget.gpus import find_gpu
from shardvit.pipeline.budget.warnings import engine_warnings, stage_warnings
from tests.pipeline.budget.planning import forecast, recipe


def warned(made, *, gpus: int = 1, gpu: str = "h200", shards: Shards | None = None) -> str:
    kind = find_gpu(gpu)
    machine = Hardware(gpus, kind, links_of(kind, gpus_per_node=8, node_gbps=None))
    found = forecast(made, gpus=gpus, gpu=gpu, shards=shards)
    return "\n".join([*stage_warnings(found, recipe=made, machine=machine), *engine_warnings(made, machine=machine)])


def test_nothing_to_warn_of():
    shards = Shards(IMAGES := 1_281_167, 1000, 110_000.0, IMAGES // 1000)
    assert warned(recipe("L/16", data={"workers": 8}), gpus=8, shards=shards) == ""


def test_what_does_not_fit_names_a_micro_batch_that_does():
    made = recipe("H/14", batch=256)
    text = warned(made, gpu="l4")
    assert "pretrain: a micro-batch of 256 does not fit" in text and "of 23 GB (24 GB less 4% in reserve)" in text
    assert "engine.activation_checkpointing=true" in text
    advised = re.search(r"engine.max_micro_batch_size=(\d+)", text)
    assert advised
    smaller = recipe("H/14", batch=256, engine={"max_micro_batch_size": int(advised[1])})
    assert "does not fit" not in warned(smaller, gpu="l4")


def test_a_state_that_does_not_fit_names_the_zero_stage_that_does():
    made = recipe("G/14", batch=64, engine={"zero_stage": 0, "activation_checkpointing": True})
    text = warned(made, gpus=64, gpu="l4")
    assert "does not fit" in text and "engine.zero_stage=1" in text and "max_micro_batch_size" not in text
    alone = warned(recipe("G/14", batch=8, engine={"zero_stage": 3}), gpu="l4")
    assert "take a GPU with more memory" in alone


def test_accumulating_what_would_fit_at_once_is_a_waste():
    assert "8 micro-batches of 32 are accumulated" in warned(recipe(batch=256, engine={"max_micro_batch_size": 32}))
    assert "accumulated" not in warned(recipe(batch=256))
    assert "accumulated" not in warned(recipe(batch=256, engine={"max_micro_batch_size": 128}))


def test_zero_2_with_accumulation():
    text = warned(recipe("H/14", batch=4096, engine={"zero_stage": 2}), gpus=4)
    assert "ZeRO 2 averages gradients after each of 4 micro-batches: engine.zero_stage=1" in text


def test_more_gpus_than_pay():
    text = warned(recipe("L/16", batch=4096, lanes=1024), gpus=1024)
    assert re.search(r"1,024 GPUs keep \d+% of the speed at a global batch of 4,096", text)
    assert "take 256 GPUs at most, or a larger batch" in text
    assert "GPUs keep" not in warned(recipe("L/16", batch=4096), gpus=64)
    assert "zero_stage" not in text


@pytest.mark.parametrize(("variant", "images"), [("L/16", 44), ("H/14", 20)])
def test_1024_gpus_need_images_and_not_zero_3(variant: str, images: int):
    """44 of L/16 and 20 of H/14 on each GPU; the remedy is the ZeRO stage where a stage is what costs the time."""
    batch = images * 1024
    assert "GPUs keep" not in warned(recipe(variant, batch=batch, lanes=1024), gpus=1024)
    assert "1,024 GPUs keep" in warned(recipe(variant, batch=batch // 2, lanes=1024), gpus=1024)
    third = warned(recipe(variant, batch=batch, lanes=1024, engine={"zero_stage": 3}), gpus=1024)
    advised = re.search(r"1,024 GPUs keep (\d+)% .*: engine.zero_stage=([012]) keeps (\d+)%", third)
    assert advised and int(advised[1]) < 25 and int(advised[3]) > 83
    assert "GPUs keep" not in warned(
        recipe(variant, batch=batch, lanes=1024, engine={"zero_stage": int(advised[2])}), gpus=1024
    )


def test_a_small_model_waits_for_the_processor():
    text = warned(recipe({"width": 64, "depth": 4, "heads": 2, "patch_size": 4}, image_size=16, batch=64), gpus=1)
    assert "waiting for the processor" in text and "larger" in text


def test_few_shards_and_few_workers():
    text = warned(recipe("B/16", batch=4096, data={"workers": 0}), gpus=64, shards=Shards(10**6, 1000, 110_000.0, 10))
    assert "10 shards for 64 processes (not one each)" in text
    assert "data.workers is 0: set data.workers=" in text
    advised = re.search(r"data.workers=(\d+)", text)
    assert advised
    enough = recipe("B/16", batch=4096, data={"workers": int(advised[1])})
    assert warned(enough, gpus=16, shards=Shards(10**6, 1000, 110_000.0, 1000)) == ""


def test_workers_are_counted_before_the_images_are_packed():
    """10,200 images/s of a node are decoded by nobody, whoever has packed them."""
    for workers, enough in ((0, False), (64, True)):
        made = recipe("B/16", batch=4096, data={"workers": workers})
        text = warned(made, gpus=8, shards=Shards(1_281_167, 1000))
        assert ("data.workers is 0: set data.workers=" in text and "107 kB each, which is assumed" in text) != enough


def test_a_gpu_that_cannot_do_the_precision():
    assert "T4 has no bf16 arithmetic" in warned(recipe("S/32", batch=64), gpu="t4")
    assert "the peak of bf16 is 15 times as high" in warned(recipe("S/32", batch=64, engine={"precision": "fp32"}))


def test_a_problem_of_the_sizes_comes_first():
    assert warned(recipe(batch=4096), gpus=6).startswith("stages.pretrain.global_batch_size 4096 does not divide")


def test_several_nodes_that_save_rarely_are_told_what_a_failure_loses():
    long = {"duration": "300000 steps"}
    assert "stages.pretrain.save_every_minutes=1" in warned(recipe(stage=long), gpus=64)
    assert "save_every" not in warned(recipe(stage=long), gpus=8)
    for often in ({"save_every_minutes": 1}, {"save_every": "1000 steps"}):
        assert "save_every" not in warned(recipe(stage=long | often), gpus=64)
