"""Bytes and time that the GPUs of a run spend on one another, and the number of GPUs at which that is too much.

A model, not a measurement: a ring's time is what each GPU sends over what a link carries, plus a delay for each of its
hops; NCCL reaches 85 % of a link. Gradients are averaged while the backward pass (two thirds of the computing) goes on;
what does not fit beneath it, the last bucket, and the all-gather of new weights at the end of a step are not hidden.

Bytes that each GPU sends in one step, for n GPUs, N weights of w bytes each; times (n - 1) / n:

    ZeRO 0 and accelerate   2wN   all-reduce of the gradients; ZeRO 0 does not overlap it, accelerate (DDP) does
    ZeRO 1 and 2            3wN   all-reduce (DeepSpeed 0.19 copies its part out of it), then all-gather of weights
    ZeRO 3                  3wN   two all-gathers of weights and a reduce-scatter; 2wN while all weights stay gathered

ZeRO 2 averages after every micro-batch, the others after the last one. ZeRO 3 has three collectives for each block,
each as slow as a ring of n is long; they overlap with computing but for the first and the last few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pipeline.budget.gpus import GB, Gpu

Way = Literal["overlapped", "default buckets"]

_LINK_EFFICIENCY = 0.85  # of the data sheet's bytes a second in one direction: 380 of 450 GB/s NVLink, 43 of 50 network
_NEAR_HOP_SECONDS, _FAR_HOP_SECONDS = 1.2e-6, 6e-6  # within a node, between nodes
_BACKWARD_SHARE = 2 / 3
_RING_COLLECTIVES_PER_BLOCK = 3  # ZeRO 3
_BARE_COLLECTIVES = 4  # of these, not hidden: the first two gathers, the last two reductions

GOOD_KEPT_SHARE = 5 / 6  # of the computing speed; where more than a sixth is waiting, more GPUs are said not to pay


@dataclass(frozen=True)
class Links:
    """What joins the GPUs.

    Attributes:
        gpus_per_node: in one machine.
        near_bytes_per_second: that a collective moves within a node.
        far_bytes_per_second: that it moves between nodes.
    """

    gpus_per_node: int
    near_bytes_per_second: float
    far_bytes_per_second: float

    def bytes_per_second(self, gpus: int) -> float:
        """Of a collective over so many GPUs."""
        near = self.near_bytes_per_second
        return near if gpus <= self.gpus_per_node else min(near, self.far_bytes_per_second)

    def hop_seconds(self, gpus: int) -> float:
        """A ring's delay from one GPU to the next, on average."""
        if gpus <= self.gpus_per_node:
            return _NEAR_HOP_SECONDS
        return (_NEAR_HOP_SECONDS * (self.gpus_per_node - 1) + _FAR_HOP_SECONDS) / self.gpus_per_node


def links_of(gpu: Gpu, *, gpus_per_node: int, node_gbps: float | None) -> Links:
    """The links of usual nodes of this GPU; `node_gbps`: the network of a node in Gbit/s, if it is another."""
    near = _LINK_EFFICIENCY * gpu.link_gb_per_second / 2 * GB
    far = _LINK_EFFICIENCY * (node_gbps or gpu.node_gbps) / 8 * GB
    return Links(gpus_per_node, near, far)


@dataclass(frozen=True)
class Traffic:
    """What one GPU sends in a step, and how long it takes.

    Attributes:
        reduce_bytes: for the average of the gradients.
        gather_bytes: for weights.
        seconds: if nothing else were done.
        bare_seconds: of them, what is not hidden behind computing.
        kept_share: computing time over the step's time.
    """

    reduce_bytes: float
    gather_bytes: float
    seconds: float
    bare_seconds: float
    kept_share: float

    @property
    def num_bytes(self) -> float:
        return self.reduce_bytes + self.gather_bytes


@dataclass(frozen=True)
class Job:
    """What the traffic depends on, but for the number of GPUs.

    Attributes:
        num_parameters: N.
        weight_bytes: w.
        depth: blocks of the model.
        zero_stage: 0 to 3; "ddp": accelerate.
        bucket_elements: averaged at a time.
        gathers_again: whether ZeRO 3 gathers the weights for the backward pass too.
    """

    num_parameters: int
    weight_bytes: int
    depth: int
    zero_stage: Literal[0, 1, 2, 3, "ddp"]
    bucket_elements: int
    gathers_again: bool = False


def traffic(
    job: Job,
    *,
    gpus: int,
    links: Links,
    compute_seconds: float,
    accumulation_steps: int = 1,
    way: Way = "overlapped",
) -> Traffic:
    """One optimizer step of `compute_seconds` of computing on each of `gpus` GPUs.

    Args:
        job: the model and the engine.
        gpus: all of them.
        links: what joins them.
        compute_seconds: of a whole step, all its micro-batches.
        accumulation_steps: micro-batches of a step.
        way: "default buckets" is what DeepSpeed's own defaults would do: one bucket, nothing hidden.
    """
    if gpus == 1:
        return Traffic(0, 0, 0, 0, 1.0)
    once = job.weight_bytes * job.num_parameters * (gpus - 1) / gpus
    speed, ring_seconds = links.bytes_per_second(gpus), (gpus - 1) * links.hop_seconds(gpus)
    if job.zero_stage == 3:
        gathers = 2 if job.gathers_again else 1
        return _zero_3(
            job,
            once=once,
            gathers=gathers,
            passes=accumulation_steps,
            speed=speed,
            ring_seconds=ring_seconds,
            compute_seconds=compute_seconds,
        )
    times = accumulation_steps if job.zero_stage == 2 else 1
    reduce_bytes, gather_bytes = 2 * once * times, once if job.zero_stage in (1, 2) else 0.0
    buckets = math.ceil(job.num_parameters / job.bucket_elements)
    gather = gather_bytes / speed + ring_seconds if gather_bytes else 0.0
    # NCCL takes a tree for small pieces over many GPUs, so that buckets cost no ring's delay each.
    tree_seconds = 2 * math.ceil(math.log2(gpus)) * links.hop_seconds(gpus)
    if way == "default buckets" or job.zero_stage == 0:
        reduce = reduce_bytes / speed + ring_seconds
        bare = reduce
    else:
        reduce = reduce_bytes / speed + times * buckets * tree_seconds
        hidden = _BACKWARD_SHARE * compute_seconds * (times / accumulation_steps)
        bare = max(reduce - hidden, reduce / (buckets * times))
    return Traffic(reduce_bytes, gather_bytes, reduce + gather, bare + gather, _kept(compute_seconds, bare + gather))


def _zero_3(
    job: Job, *, once: float, gathers: int, passes: int, speed: float, ring_seconds: float, compute_seconds: float
) -> Traffic:
    collectives = _RING_COLLECTIVES_PER_BLOCK * job.depth * passes
    gather_bytes, reduce_bytes = gathers * once * passes, once * passes
    seconds = (gather_bytes + reduce_bytes) / speed + collectives * ring_seconds
    bare = min(seconds, max(0.0, seconds - compute_seconds) + _BARE_COLLECTIVES * seconds / collectives)
    return Traffic(reduce_bytes, gather_bytes, seconds, bare, _kept(compute_seconds, bare))


def _kept(compute_seconds: float, bare_seconds: float) -> float:
    return compute_seconds / (compute_seconds + bare_seconds)


def most_useful_gpus(
    job: Job,
    *,
    links: Links,
    global_batch_images: int,
    images_per_second: float,
    host_seconds: float = 0.0,
    least_share: float = GOOD_KEPT_SHARE,
) -> int:
    """The most GPUs, of 1, 2, 4, ... as far as they divide the batch, that keep `least_share` of their speed.

    A step takes at least `host_seconds` of a processor.
    """
    best, gpus = 1, 1
    while global_batch_images % gpus == 0:
        compute_seconds = global_batch_images / gpus / images_per_second
        sent = traffic(job, gpus=gpus, links=links, compute_seconds=compute_seconds)
        if compute_seconds < least_share * max(compute_seconds + sent.bare_seconds, host_seconds):
            break
        best, gpus = gpus, 2 * gpus
    return best
