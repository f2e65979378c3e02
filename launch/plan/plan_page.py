"""Format a plan as a page for people new to planning, and as JSON. Computes nothing."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shardvit.data_shards.text import PAGE_WIDTH, printable, show_bytes, show_duration, table
from shardvit.pipeline.budget.communication import GOOD_KEPT_SHARE
from shardvit.pipeline.budget.forecast import Hardware, StageForecast
from shardvit.pipeline.budget.gpus import RESERVE_SHARE
from shardvit.pipeline.recipe.schema import EngineConfig, Recipe
from shardvit.pipeline.recipe.stages.image_growth import shown

UNKNOWN = "?"


@dataclass(frozen=True)
class RecipeForecast:
    """Findings of `shardvit plan`."""

    recipe: Recipe
    machine: Hardware
    gpus_per_node: int
    warnings: tuple[str, ...]
    stages: tuple[StageForecast, ...]

    @property
    def hours(self) -> float | None:
        hours = [stage.time.hours if stage.time else None for stage in self.stages]
        return None if None in hours else sum(each or 0.0 for each in hours)


def as_page(plan: RecipeForecast) -> str:
    """Format the plan as aligned text, at most 120 columns wide."""
    lines = [_title(plan), "", *([_wrapped(f"! {text}") for text in plan.warnings] or ["No warnings."])]
    values = [_column(stage) for stage in plan.stages]
    rows = [[label, *(each.get(label, "") for each in values), words] for label, words in _words(plan).items()]
    lines += ["", columns([["", *(stage.name for stage in plan.stages), ""], *(row for row in rows if any(row[1:-1]))])]
    if "swap_head" in plan.recipe.stages.names:
        lines.append("swap_head changes the head on one processor core: seconds, no GPU.")
    if len(plan.stages) > 1 and plan.hours is not None:
        gpu_hours = plan.hours * plan.machine.gpus
        lines.append(f"In all: {show_duration(plan.hours * 3600)} on the wall clock, {_number(gpu_hours)} GPU-hours.")
    for stage in plan.stages:
        lines += ["", _phases(stage)] if stage.phases else []
        lines += ["", _memory(plan, stage)]
    return printable("\n".join([*lines, "", *map(_wrapped, _glossary(plan))]))


def columns(rows: list[list[str]]) -> str:
    """Align labels left, values right, and wrap the explanations after them."""
    return table(rows, align=f"l{'r' * (len(rows[0]) - 2)}l", width=PAGE_WIDTH - 2)


def engine_words(engine: EngineConfig) -> str:
    """Name the engine: "DeepSpeed ZeRO 1, bf16"."""
    how = f"DeepSpeed ZeRO {engine.zero_stage}" if engine.backend == "deepspeed" else "accelerate (DDP)"
    return f"{how}, {engine.precision}"


def _title(plan: RecipeForecast) -> str:
    gpus, gpu = plan.machine.gpus, plan.machine.gpu
    nodes = -(-gpus // plan.gpus_per_node)
    where = f"{gpus:,} process{'es' * (gpus > 1)}"
    if gpu is not None:
        where = f"{gpus:,} x {gpu.name}" + (f", {nodes:,} nodes of {plan.gpus_per_node}" if nodes > 1 else "")
    return f"Plan of {plan.recipe.name} on {where}: {engine_words(plan.recipe.engine)}"


def _known(value: float | None, show: Callable[[float], str], *, unknown: str = UNKNOWN) -> str:
    return unknown if value is None else show(value)


def _column(stage: StageForecast) -> dict[str, str]:
    plan, time, sent, images = stage.plan, stage.time, stage.own.traffic, stage.total_images
    of_epoch, shards = stage.shards.num_images, stage.shards.num_shards
    batch = f"{plan.world_size:,} x {plan.accumulation_steps} x {plan.micro_batch_size}"
    found = {
        "image size, px": shown(stage.config.image_size).removesuffix(" px"),
        "parameters": short(stage.cost.parameters),
        "FLOPs an image": short(stage.cost.training_flops),
        "global batch": f"{stage.config.global_batch_size:,}",
        "": batch if plan.global_batch_images == stage.config.global_batch_size else f"({batch})",
        "steps": UNKNOWN if images is None else f"{plan.total_steps:,}",
        "images": _known(images, short),
        "epochs": UNKNOWN if images is None or of_epoch is None else _number(images / of_epoch),
        "checkpoints": show_bytes(stage.disk.num_bytes),
        "shards a process": _known(shards, lambda count: f"{count / plan.world_size:.3g}"),
    }
    if time:
        found |= {
            "MFU": _known(time.speed.mfu, lambda share: f"{share:.1%}", unknown=""),
            "images/s of one GPU": _number(time.speed.images_per_second),
            "kept together": f"{time.kept_share:.1%}" if sent or plan.world_size == 1 else "",  # else links unknown
            "images/s in all": _number(time.images_per_second),
            "wall clock": _known(time.hours, lambda hours: show_duration(hours * 3600)),
            "GPU-hours": _known(time.gpu_hours, _number),
            "GPUs that pay": f"{time.useful_gpus:,}" if sent else "",
            "host-bound below": f"{time.host_bound_images:,}" if time.host_bound_images else "",
        }
        if sent and plan.world_size > 1:
            found["sent in a step"] = show_bytes(sent.num_bytes)
            found["sending"] = _part(sent.seconds, time.step_seconds)
    if stage.reading and stage.ahead:
        found |= {
            "to be read, a second": _known(stage.reading.bytes_per_second, show_bytes),
            "cores to decode": f"{stage.reading.cores:.3g}",
            "data workers": f"{stage.ahead.workers:,}",
            "host memory": show_bytes(stage.ahead.ahead_bytes + stage.ahead.page_locked_bytes),
        }
    if saving := stage.saving:
        found["host memory, saving"] = show_bytes(saving.process_bytes)
        found["... of a node"] = _known(saving.node_bytes, show_bytes, unknown="")
        if saving.copy_seconds is not None and saving.stall_seconds is not None:
            found["stall of a save"] = _part(saving.stall_seconds, saving.copy_seconds)
    if stage.teacher:
        found["teacher, FLOPs"], found["... on each GPU"] = (
            short(stage.teacher.forward_flops),
            show_bytes(stage.teacher.num_bytes),
        )
    if stage.own.state.host:
        found["offloaded"] = show_bytes(stage.own.state.host)
    return found


def _part(seconds: float, whole: float) -> str:
    return f"{1000 * seconds:.3g} of {1000 * whole:.3g}"


def _words(plan: RecipeForecast) -> dict[str, str]:
    bases = dict.fromkeys(stage.time.speed.basis for stage in plan.stages if stage.time)
    disks = (f"{stage.disk.most_checkpoints} of {show_bytes(stage.disk.checkpoint_bytes)}" for stage in plan.stages)
    assumed = [stage.reading.assumed_image_bytes for stage in plan.stages if stage.reading]
    sizes = dict.fromkeys(show_bytes(each) for each in assumed if each)
    images = f"images of {' and '.join(sizes)}, which is assumed" if sizes else "the bytes"
    links, gpu, joined = plan.machine.links, plan.machine.gpu, ""
    if links and gpu:
        joined = f" ({gpu.link} {links.near_bytes_per_second / 1e9:.0f}"
        if plan.machine.gpus > plan.gpus_per_node:
            joined += f", network {links.far_bytes_per_second / 1e9:.0f}"
        joined += " GB/s)"
    rates = {stage.saving.link_bytes_per_second for stage in plan.stages if stage.saving} - {None}
    pcie = f" ({max(each or 0 for each in rates) / 1e9:.3g} GB/s, assumed)" if rates else ""
    return {
        "image size, px": "a side",
        "parameters": "trained weights, head included",
        "FLOPs an image": "of its forward and backward pass",
        "teacher, FLOPs": "of its forward pass on an image; among those above",
        "... on each GPU": "its weights",
        "global batch": "images per optimizer step",
        "": "= GPUs x passes accumulated x images per GPU and pass",
        "steps": "of the optimizer",
        "images": "seen in training",
        "epochs": "times that each image is seen",
        "MFU": f"of the GPU's peak: {'; '.join(bases)}",
        "images/s of one GPU": "alone",
        "kept together": "of that speed; the rest is waiting for others or the processor",
        "images/s in all": "of all GPUs",
        "wall clock": "evaluating, saving, starting and waiting for data come on top",
        "GPU-hours": "what is paid for: hours x GPUs",
        "sent in a step": "by each GPU: gradients to average, new weights",
        "sending": f"ms of a step, mostly while it computes{joined}",
        "GPUs that pay": f"at most: of 1, 2, 4, ... the most that keep {GOOD_KEPT_SHARE:.0%} of their speed",
        "host-bound below": "images per GPU and pass: with fewer, the processor that launches its work is the limit",
        "checkpoints": f"of disk, at most: {'; '.join(dict.fromkeys(disks))}; one being written",
        "shards a process": "on average; many spread better than few",
        "to be read, a second": "from the shards, over all nodes",
        "cores to decode": f"over all nodes; estimated from one benchmark and {images}",
        "data workers": f"of each process; data.workers is {plan.recipe.data.workers}",
        "host memory": "of each process: images that they have read ahead, and two batches on their way to the GPU",
        "host memory, saving": "of process 0, which has most: a checkpoint's copy; kept",
        "... of a node": "of all processes of the first one",
        "stall of a save": f"ms of its copy that a step does not hide{pcie}",
        "offloaded": "of each process, in host memory (engine.offload); its time is not planned",
    }


def _phases(stage: StageForecast) -> str:
    """Tabulate the phases of images that grow; the columns above are of the last."""
    rows = [["", "steps", "FLOPs an image", "ms a step", "hours"]]
    for each in stage.phases:
        seconds = each.step_seconds
        times = ["", ""] if seconds is None else [f"{1000 * seconds:.3g}", f"{each.steps * seconds / 3600:.3g}"]
        rows.append([f"{each.image_size} px", f"{each.steps:,}", short(each.training_flops), *times])
    flops = sum(each.steps * each.training_flops for each in stage.phases)
    share = flops / (sum(each.steps for each in stage.phases) * stage.cost.training_flops)
    title = f"{stage.name}: images grow, and take {share:.1%} of the FLOPs of {stage.config.image_size} px alone"
    return f"{title}; other tables are of the last phase\n{table(rows, align='lr')}"


def _memory(plan: RecipeForecast, stage: StageForecast) -> str:
    """Tabulate one GPU's memory under each ZeRO stage, without and with activation checkpointing."""
    gpu, images = plan.machine.gpu, stage.plan.micro_batch_size
    unit, name = (10**9, "GB") if stage.own.peak_bytes["all"] >= 10**9 else (10**6, "MB")

    def show(num_bytes: int) -> str:
        return f"{num_bytes / unit:.2f}" if num_bytes < 100 * unit else f"{num_bytes / unit:.0f}"

    header = ["", "weights", "gradients", "optimizer", "passing", "activations", "at the peak"]
    header += ["fits", "most images"] if gpu else []
    header += ["sent a step", "kept"] if stage.own.traffic else []
    rows = [header]
    for zero_stage, row in stage.memory.items():
        held, peaks, most = row.state, row.peak_bytes.values(), row.largest_micro_batch
        label = f"ZeRO {zero_stage}{' *' * (zero_stage == stage.zero_stage)}" if len(stage.memory) > 1 else "DDP"
        cells = [label, *map(show, (held.weights, held.gradients, held.optimizer, held.passing_bytes))]
        cells.append("/".join(show(each * images) for each in stage.image_bytes.values()))
        cells.append("/".join(map(show, peaks)))
        if gpu and most:
            cells.append("/".join("yes" if peak <= gpu.usable_bytes else "NO" for peak in peaks))
            cells.append("/".join(f"{number:,}" for number in most.values()))
        if row.traffic:
            cells += [show_bytes(row.traffic.num_bytes), f"{row.kept_share or 0:.0%}"]
        rows.append(cells)
    usable = f" of {show_bytes(gpu.usable_bytes)}" if gpu else ""
    title = f"{stage.name}: {name} on one GPU{usable}, {images:,} images at a time; after a slash: with checkpointing"
    return f"{title}\n{table(rows, align='lr')}"


def _glossary(plan: RecipeForecast) -> Iterator[str]:
    yield (
        "MFU, model FLOPs utilisation: the share of a GPU's peak FLOP/s that goes into the model; 40 to 50 % is good, "
        "55 % is a record. FLOPs: additions and multiplications."
    )
    yield (
        "ZeRO: what the GPUs share out among them. 0 nothing, 1 the optimizer state, 2 gradients too, 3 weights too; "
        "* is the recipe's. Passing: buffers, copies and gathered weights that a step needs for a while."
    )
    if gpu := plan.machine.gpu:
        precision = plan.recipe.engine.precision
        yield (
            f"{gpu.name}: {gpu.peak_flops(precision) / 1e12:,.3g} TFLOP/s in {precision}, "
            f"{show_bytes(gpu.memory_bytes)} ({gpu.source}), of which {RESERVE_SHARE:.0%} are kept free for CUDA, NCCL "
            "and gaps."
        )


def _wrapped(text: str) -> str:
    return "\n".join(
        textwrap.wrap(text, PAGE_WIDTH - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    )


def short(number: float) -> str:
    """Shorten 304326632 to "304.3 M"."""
    for size, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:#.4g}{prefix}"
    return f"{number:.4g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def as_json(plan: RecipeForecast) -> dict[str, Any]:
    """Return the whole plan under the code's names, in seconds, bytes and shares."""
    gpu, links = plan.machine.gpu, plan.machine.links
    return {
        "recipe": plan.recipe.name,
        "gpus": plan.machine.gpus,
        "gpus_per_node": plan.gpus_per_node,
        "gpu": gpu and {**asdict(gpu), "usable_bytes": gpu.usable_bytes},
        "links": links and asdict(links),
        "engine": plan.recipe.engine.model_dump(mode="json"),
        "warnings": list(plan.warnings),
        "hours": plan.hours,
        "gpu_hours": None if plan.hours is None else plan.hours * plan.machine.gpus,
        "stages": {stage.name: _stage_json(stage) for stage in plan.stages},
    }


# Fields only training needs: left out of the JSON.
_OF_TRAINING = {
    "schedule",
    "size_phases",
    "save_after_evaluations",
    "patch_dropout",
    "max_skipped_steps",
    "slow_rank",
    "seed",
}


def _stage_json(stage: StageForecast) -> dict[str, Any]:
    plan = {key: value for key, value in asdict(stage.plan).items() if key not in _OF_TRAINING}
    parts = {key: getattr(stage, key) for key in ("cost", "saving", "time", "shards", "reading", "ahead")}
    return {key: part and asdict(part) for key, part in parts.items()} | {
        "plan": plan | {"warmup_steps": stage.plan.schedule.warmup_steps},
        "problem": stage.problem,
        "total_images": stage.total_images,
        **({"phases": [asdict(each) for each in stage.phases]} if stage.phases else {}),
        "memory": {
            f"zero_{zero_stage}": {**asdict(row), "resting_bytes": row.state.resting_bytes}
            for zero_stage, row in stage.memory.items()
        },
        "disk": {**asdict(stage.disk), "num_bytes": stage.disk.num_bytes},
    }
