"""Model the bytes and time of collectives, and the number of GPUs from which they cost too much. Not measured.

A ring takes (bytes sent per GPU) / (link bandwidth) plus a latency per hop; NCCL reaches 85 % of a link. Gradients are
averaged during the backward pass (two thirds of the compute time), a ViT's weights gathered during the next forward
pass; what exceeds them, the last bucket and the first are exposed.

Bytes sent per GPU and step, for n GPUs and N weights of w bytes; times (n - 1) / n:

    ZeRO 0 and accelerate   2wN   all-reduce of the gradients (DDP)
    ZeRO 1 and 2            2wN   reduce-scatter, all-gather of weights (`sharded_step`)
       fp16, offload        3wN   all-reduce (DeepSpeed 0.19 copies its part out of it), then all-gather of weights
    ZeRO 3                  3wN   two all-gathers of weights and a reduce-scatter; 2wN while all weights stay gathered

ZeRO 2 averages after every micro-batch, the others after the last. ZeRO 3 has three collectives per block, each with
the latency of a ring of n; all but the first and last few overlap with compute.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardvit.pipeline.budget.gpus import GB, Gpu

Way = Literal["overlapped", "in turn", "at once"]
"""Average gradients during the backward pass; bucket by bucket while it waits (DeepSpeed without overlap); or in one
message after it (ours)."""
Reduction = Literal["scatter", "all-reduce"]
"""How ZeRO 1 and 2 average: ours, or DeepSpeed's."""
ZeroKind = Literal[1, 2, 3, "ddp"]
"""A ZeRO stage; ddp: ZeRO 0 and accelerate."""

_LINK_EFFICIENCY = 0.85  # of the data sheet's bandwidth in one direction: 380 of 450 GB/s NVLink, 43 of 50 network
_NEAR_HOP_SECONDS, _FAR_HOP_SECONDS = 1.2e-6, 6e-6  # within a node, between nodes
_BACKWARD_SHARE = 2 / 3
_RING_COLLECTIVES_PER_BLOCK = 3  # ZeRO 3
_BARE_COLLECTIVES = 4  # exposed ones: the first two gathers, the last two reductions

GOOD_KEPT_SHARE = 5 / 6  # of the speed; with more than a sixth of the time spent waiting, more GPUs do not pay off


@dataclass(frozen=True)
class Links:
    """Collective bandwidth, bytes/s: within a node (near), between nodes (far)."""

    gpus_per_node: int
    near_bytes_per_second: float
    far_bytes_per_second: float

    def bytes_per_second(self, gpus: int) -> float:
        near = self.near_bytes_per_second
        return near if gpus <= self.gpus_per_node else min(near, self.far_bytes_per_second)

    def hop_seconds(self, gpus: int) -> float:
        if gpus <= self.gpus_per_node:
            return _NEAR_HOP_SECONDS
        return (_NEAR_HOP_SECONDS * (self.gpus_per_node - 1) + _FAR_HOP_SECONDS) / self.gpus_per_node


def links_of(gpu: Gpu, *, gpus_per_node: int, node_gbps: float | None) -> Links:
    """Get the links of typical nodes with this GPU; `node_gbps`: the node's network in Gbit/s, if it differs."""
    near = _LINK_EFFICIENCY * gpu.link_gb_per_second / 2 * GB
    far = _LINK_EFFICIENCY * (node_gbps or gpu.node_gbps) / 8 * GB
    return Links(gpus_per_node, near, far)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step, and the time."""

    reduce_bytes: float  # to average the gradients
    gather_bytes: float  # of weights
    seconds: float  # without overlap
    bare_seconds: float  # the part not hidden by compute
    kept_share: float  # compute time over the step's time

    @property
    def num_bytes(self) -> float:
        return self.reduce_bytes + self.gather_bytes


@dataclass(frozen=True)
class Workload:
    """What traffic depends on, apart from the number of GPUs."""

    num_parameters: int  # N
    weight_bytes: int  # w
    depth: int  # blocks of the model
    zero_stage: ZeroKind
    bucket_elements: int  # gradients averaged at a time
    gathers_again: bool = False  # ZeRO 3 gathers weights again for the backward pass
    way: Way = "overlapped"
    reduction: Reduction = "scatter"
    hides_gathers: bool = True  # behind the forward pass, which waits for weights block by block
    least_piece_elements: int = 0  # of a message, for each GPU


def traffic(work: Workload, *, gpus: int, links: Links, compute_seconds: float, accumulation_steps: int = 1) -> Traffic:
    """Forecast an optimizer step; `compute_seconds`: of one GPU, over all its micro-batches."""
    if gpus == 1:
        return Traffic(0, 0, 0, 0, 1.0)
    once = work.weight_bytes * work.num_parameters * (gpus - 1) / gpus
    speed, hop_seconds = links.bytes_per_second(gpus), links.hop_seconds(gpus)
    ring_seconds = (gpus - 1) * hop_seconds
    if work.zero_stage == 3:
        collectives = _RING_COLLECTIVES_PER_BLOCK * work.depth * accumulation_steps
        gather_bytes = (2 if work.gathers_again else 1) * once * accumulation_steps
        reduce_bytes = once * accumulation_steps
        seconds = (gather_bytes + reduce_bytes) / speed + collectives * ring_seconds
        bare = min(seconds, max(0.0, seconds - compute_seconds) + _BARE_COLLECTIVES * seconds / collectives)
        bare = seconds if work.way == "in turn" else bare
    else:
        scatters = work.zero_stage != "ddp" and work.reduction == "scatter"
        times = accumulation_steps if work.zero_stage == 2 else 1
        gather_bytes = once if work.zero_stage in (1, 2) else 0.0
        reduce_bytes = (1 if scatters else 2) * once * times
        if work.way == "at once":
            buckets = 1
        elif scatters:  # whole blocks
            elements = max(work.bucket_elements, work.least_piece_elements * gpus)
            blocks = max(1, elements * work.depth // work.num_parameters)
            buckets = math.ceil(work.depth / blocks)
        else:
            buckets = math.ceil(work.num_parameters / work.bucket_elements)
        # NCCL all-reduces small messages over many GPUs by trees, so such a bucket does not cost a ring's latency.
        tree_seconds = 2 * math.ceil(math.log2(gpus)) * hop_seconds
        latency = buckets * (ring_seconds if scatters or buckets == 1 else tree_seconds)
        reduce = reduce_bytes / speed + times * latency
        gather = gather_bytes / speed + (latency if scatters else ring_seconds) if gather_bytes else 0.0
        behind_backward = behind_forward = 0.0
        if work.way == "overlapped":
            behind_backward = _BACKWARD_SHARE * compute_seconds * (times / accumulation_steps)
            behind_forward = (1 - _BACKWARD_SHARE) * compute_seconds / accumulation_steps
        seconds, bare = reduce + gather, max(reduce - behind_backward, reduce / (buckets * times))
        hides = scatters and work.hides_gathers
        bare += max(gather - behind_forward, gather / buckets) if hides else gather
    return Traffic(reduce_bytes, gather_bytes, seconds, bare, compute_seconds / (compute_seconds + bare))


def most_useful_gpus(
    work: Workload,
    *,
    links: Links,
    global_batch_images: int,
    images_per_second: float,
    host_seconds: float = 0.0,
    least_share: float = GOOD_KEPT_SHARE,
) -> int:
    """Find the most GPUs (1, 2, 4, ... dividing the batch) that pay off; a step takes at least `host_seconds`."""
    best, gpus = 1, 1
    while global_batch_images % gpus == 0:
        compute_seconds = global_batch_images / gpus / images_per_second
        sent = traffic(work, gpus=gpus, links=links, compute_seconds=compute_seconds)
        if compute_seconds < least_share * max(compute_seconds + sent.bare_seconds, host_seconds):
            break
        best, gpus = gpus, 2 * gpus
    return best
