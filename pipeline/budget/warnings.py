"""Warn before a run starts, worst first and with remedies: what cannot run, does not fit, or wastes GPUs."""

import math
from collections.abc import Iterator
from itertools import chain

from shardvit.data_shards.text import counted, show_bytes, show_duration
from shardvit.pipeline.budget.communication import GOOD_KEPT_SHARE
from shardvit.pipeline.budget.forecast import Hardware, StageForecast
from shardvit.pipeline.budget.gpus import RESERVE_SHARE
from shardvit.pipeline.budget.speed import MOST_WORKERS, workers_needed
from shardvit.pipeline.recipe.schema import Recipe

_FULL_IMAGES = 64  # per micro-batch, enough to use a GPU well (B/16 and larger)
_ROOMY = 2  # accumulation is a waste if this many times the micro-batch would fit
_OF_NO_WORKER = 0.1  # of a core: without workers, decoding may take a tenth of the training loop's time
_FEW_SHARDS = 4  # per process
_RARE_SAVES_SECONDS = 600.0  # at a failure an hour, 92 % of the time would train at most (`launch.bench.goodput`)


def stage_warnings(forecast: StageForecast, *, recipe: Recipe, machine: Hardware) -> Iterator[str]:
    """Warn about one stage."""
    texts = chain(
        [forecast.problem] if forecast.problem else [],
        _memory(forecast, machine=machine),
        _waste(forecast, recipe=recipe, machine=machine),
        _data(forecast, recipe=recipe, machine=machine),
        _saves(forecast, machine=machine),
    )
    for text in texts:
        yield text if text.startswith(f"stages.{forecast.name}") else f"{forecast.name}: {text}"


def engine_warnings(recipe: Recipe, *, machine: Hardware) -> Iterator[str]:
    """Warn about what affects all stages."""
    gpu, precision = machine.gpu, recipe.engine.precision
    if gpu and precision == "bf16" and not gpu.bf16_tflops:
        yield f"{gpu.name} has no bf16 arithmetic, so its float32 peak is counted: set engine.precision=fp16"
    if gpu and precision == "fp32" and (times := gpu.peak_flops("bf16") / gpu.peak_flops("fp32")) > 1:
        yield f"engine.precision fp32: the peak of bf16 is {times:.0f} times as high on {gpu.name}"


def _memory(forecast: StageForecast, *, machine: Hardware) -> Iterator[str]:
    own, kind, micro_batch = forecast.own, forecast.activations, forecast.plan.micro_batch_size
    if machine.gpu is None or own.largest_micro_batch is None:
        return
    usable, peak, most = machine.gpu.usable_bytes, own.peak_bytes[kind], own.largest_micro_batch[kind]
    if peak > usable:
        advice = [f"engine.max_micro_batch_size={most}"] if most else []
        if kind == "all" and own.peak_bytes["checkpointed"] <= usable:
            advice.append("engine.activation_checkpointing=true (a third more FLOPs)")
        fits = (stage for stage, row in forecast.memory.items() if row.peak_bytes[kind] <= usable)
        advice += [f"engine.zero_stage={stage}" for stage in fits if stage > forecast.zero_stage][:1]
        take = ", or ".join(
            advice or ["a GPU with more memory, more GPUs and ZeRO 3", "engine.offload=optimizer (slow)"]
        )
        yield (
            f"a micro-batch of {micro_batch} does not fit: {show_bytes(peak)} of {show_bytes(usable)} "
            f"({show_bytes(machine.gpu.memory_bytes)} less {RESERVE_SHARE:.0%} in reserve); take {take}"
        )
    elif forecast.plan.accumulation_steps > 1 and micro_batch < _FULL_IMAGES and most >= _ROOMY * micro_batch:
        yield (
            f"{forecast.plan.accumulation_steps} micro-batches of {micro_batch} are accumulated, but {most:,} would "
            "fit at once: raise engine.max_micro_batch_size"
        )


def _waste(forecast: StageForecast, *, recipe: Recipe, machine: Hardware) -> Iterator[str]:
    if recipe.engine.zero_stage == 2 and forecast.plan.accumulation_steps > 1 and machine.gpus > 1:
        yield (
            f"ZeRO 2 averages gradients after each of {forecast.plan.accumulation_steps} micro-batches: "
            "engine.zero_stage=1 does it once"
        )
    time = forecast.time
    if time is None or time.kept_share >= GOOD_KEPT_SHARE:
        return
    kept = f"{machine.gpus:,} GPUs keep" if machine.gpus > 1 else "one GPU keeps"
    why = "waiting for one another"
    if time.host_seconds >= time.step_seconds:
        why = (
            f"waiting for the processor, which needs about {1000 * time.host_seconds:.0f} ms to launch a step "
            f"(host-bound below {time.host_bound_images:,} images a GPU)"
        )
    if time.useful_gpus >= machine.gpus:
        advice = "take a larger micro-batch"
    elif time.useful_gpus == 1:
        advice = "more than one GPU gains nothing; a larger batch would help"
    else:
        advice = f"take {counted(time.useful_gpus, 'GPU')} at most, or a larger batch"
    # ZeRO 3 waits for small collectives: another stage may be fast enough, and fit.
    usable = machine.gpu.usable_bytes if machine.gpu else math.inf
    shares = {
        row.kept_share: stage
        for stage, row in reversed(forecast.memory.items())
        if row.kept_share and row.peak_bytes[forecast.activations] <= usable
    }
    if (best := max(shares, default=0.0)) >= GOOD_KEPT_SHARE:
        advice = f"engine.zero_stage={shares[best]} keeps {best:.0%}; or {advice}"
    batch = forecast.config.global_batch_size
    yield f"{kept} {time.kept_share:.0%} of the speed at a global batch of {batch:,}, {why}: {advice}"


def _data(forecast: StageForecast, *, recipe: Recipe, machine: Hardware) -> Iterator[str]:
    count, needed, gpus = forecast.shards.num_shards, forecast.reading, machine.gpus
    if count is not None and count < _FEW_SHARDS * gpus and gpus > 1:
        few = "not one" if count < gpus else f"{count / gpus:.1f}"
        yield (
            f"{counted(count, 'shard')} for {gpus:,} processes ({few} each), so that several read the same: harmless "
            f"on local disks; else pack smaller ones (`shardvit check --world-size {gpus}`)"
        )
    if needed is None:
        return
    each, workers = needed.cores / gpus, recipe.data.workers
    if each > (MOST_WORKERS if workers == "auto" else workers or _OF_NO_WORKER):
        assumed = needed.assumed_image_bytes
        size = f" (of images of {show_bytes(assumed)} each, which is assumed)" if assumed else ""
        speed = needed.images_per_second / gpus
        enough = workers_needed(decode_seconds=needed.decode_ms / 1000, images_per_second=speed)
        most = f", which is {MOST_WORKERS} at most" if workers == "auto" else ""
        yield (
            f"decoding{size} keeps about {each:.1f} cores busy for each process, and data.workers is {workers}{most}: "
            f"set data.workers={enough}, or pack with --resize-short"
        )


def _saves(forecast: StageForecast, *, machine: Hardware) -> Iterator[str]:
    config, plan, time, links = forecast.config, forecast.plan, forecast.time, machine.links
    is_large = links is not None and machine.gpus > links.gpus_per_node  # one node fails once in weeks
    if time is None or time.hours is None or not is_large or config.save_every_minutes:
        return
    seconds = (plan.save_steps or plan.total_steps) * time.step_seconds
    if seconds > _RARE_SAVES_SECONDS:
        yield (
            f"a failure loses {show_duration(seconds)} at most, and half of that on average (save_every): set "
            f"stages.{forecast.name}.save_every_minutes=1"
        )
