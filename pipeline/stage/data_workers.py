"""Choose `data.workers` of a rank, with a line of reasons.

auto times decoding on a few dozen of the stage's first images, which are read anyway (0.5 s on an idle core), and
starts none on a CPU, whose cores train. The sample order does not depend on it.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardvit.data_shards.control_groups import core_quota
from shardvit.data_shards.loading.loader import TrainBatches
from shardvit.data_shards.loading.workers import start_fork_server
from shardvit.data_shards.vocabulary import WorkerKind
from shardvit.pipeline.budget.gpus import gpu_of_driver
from shardvit.pipeline.budget.speed import anchored_speed, own_cores, workers_needed, workers_within
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName


@dataclass(frozen=True)
class DataWorkers:
    """Workers that read and decode ahead for a rank."""

    count: int
    kind: WorkerKind


def expect_data_workers(recipe: Recipe) -> None:
    """Preload the libraries of worker processes, if there will be any, without waiting."""
    count = recipe.data.workers
    if count not in ("auto", 0) and recipe.data.kind_of_workers(count) == "process":
        start_fork_server()


def data_workers(
    recipe: Recipe,
    *,
    stage: StageName,
    batches: TrainBatches,
    step: int,
    device: torch.device,
    ranks: Ranks,
    say: Callable[[str], None],
) -> DataWorkers:
    """Choose the workers of a stage that resumes at `step`; collective under auto."""
    count = recipe.data.workers
    if count == "auto":
        count = 0
        if device.type != "cpu":
            decode_seconds = _decode_seconds(batches, step=step)
            name = torch.cuda.get_device_name(device)
            count, why = choose(
                recipe,
                stage=stage,
                num_classes=len(batches.access.shards.classes),
                decode_seconds=decode_seconds,
                gpu_name=name,
                cores=cores_of(ranks),
            )
            say(f"{stage}: data.workers auto: {why}")
    return DataWorkers(count, recipe.data.kind_of_workers(count))


def choose(
    recipe: Recipe,
    *,
    stage: StageName,
    num_classes: int,
    decode_seconds: float | None,
    gpu_name: str,
    cores: float,
) -> tuple[int, str]:
    """Choose the number and give reasons; `decode_seconds`: None if the first images cannot be decoded."""
    gpu = gpu_of_driver(gpu_name)
    needed, why = None, f"how fast {gpu_name} trains is not known"
    if decode_seconds is None:
        why = "the first images cannot be decoded"
    elif gpu is not None:
        speed, basis = anchored_speed(recipe, stage=stage, num_classes=num_classes, gpu=gpu)
        needed = workers_needed(decode_seconds=decode_seconds, images_per_second=speed)
        why = f"{gpu.name} is expected to take {speed:,.0f} images/s ({basis})"
    count = workers_within(cores, needed=needed)
    of = f" of {needed} that would keep up" if needed is not None and needed > count else ""
    cost = f"{1000 * decode_seconds:.2f} ms of a core an image; " if decode_seconds is not None else ""
    kind = {"thread": "threads", "process": "processes"}[recipe.data.kind_of_workers(count)]
    return count, f"{count}{of} ({kind}): {cost}{why}; {cores:.3g} cores for each process of the run"


def _decode_seconds(batches: TrainBatches, *, step: int) -> float | None:
    """Time decoding of one image in one thread, as in a worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return batches.decode_seconds(step * batches.layout.accumulation_steps)
    finally:
        torch.set_num_threads(threads)


def cores_of(ranks: Ranks) -> float:
    """Count this rank's share of its host's cores; collective."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    everyone = ranks.gather_objects((platform.node(), mine))
    here = [cores for host, cores in everyone if host == platform.node()]
    return own_cores(mine, on_this_host=here, quota_cores=core_quota())
