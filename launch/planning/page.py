"""The plan as a page for people who have never computed one, and as JSON. Text only: no number is made here.

Warnings first; then a line for each quantity, a column for each stage, and what it means in words; then the memory of
one GPU under each ZeRO stage; then the words that need explaining.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_shards.text import printable, show_bytes, show_duration
from pipeline.budget.communication import GOOD_KEPT_SHARE
from pipeline.budget.forecast import Hardware, StageForecast
from pipeline.budget.gpus import RESERVE_SHARE
from pipeline.budget.memory import ZeroStage
from pipeline.recipe.schema import Recipe

_UNKNOWN = "?"
_WIDTH, _NARROWEST = 118, 30


@dataclass(frozen=True)
class Plan:
    """What `shardvit plan` found."""

    recipe: Recipe
    machine: Hardware
    gpus_per_node: int
    warnings: tuple[str, ...]
    stages: tuple[StageForecast, ...]

    @property
    def hours(self) -> float | None:
        """Of all stages; None: of one it is not known."""
        hours = [stage.time.hours if stage.time else None for stage in self.stages]
        return None if None in hours else sum(each or 0.0 for each in hours)


def as_page(plan: Plan) -> str:
    """Aligned text, at most 120 columns."""
    lines = [_title(plan), ""]
    lines += [line for text in plan.warnings for line in _wrapped(f"! {text}")] or ["No warnings."]
    rows = [(label, [show(stage) for stage in plan.stages], words(plan)) for label, show, words in _ROWS]
    rows = [row for row in rows if any(row[1])]
    names: list[str] = [stage.name for stage in plan.stages]
    lines += ["", *columns([("", names, ""), *rows])]
    if "swap_head" in plan.recipe.stages.names:
        lines.append("swap_head changes the head on one processor core: seconds, no GPU.")
    if len(plan.stages) > 1 and plan.hours is not None:
        gpu_hours = plan.hours * plan.machine.gpus
        lines.append(f"In all: {show_duration(plan.hours * 3600)} on the wall clock, {_number(gpu_hours)} GPU-hours.")
    for stage in plan.stages:
        lines += ["", *_memory(plan, stage)]
    return printable("\n".join([*lines, "", *_glossary(plan)]))


def _title(plan: Plan) -> str:
    gpus, gpu, engine = plan.machine.gpus, plan.machine.gpu, plan.recipe.engine
    nodes = -(-gpus // plan.gpus_per_node)
    if gpu is None:
        where = f"{gpus:,} processes" if gpus > 1 else "1 process"
    else:
        where = f"{gpus:,} x {gpu.name}" + (f", {nodes:,} nodes of {plan.gpus_per_node}" if nodes > 1 else "")
    how = f"DeepSpeed ZeRO {engine.zero_stage}" if engine.backend == "deepspeed" else "accelerate (DDP)"
    return f"Plan of {plan.recipe.name} on {where}: {how}, {engine.precision}"


# A row of the table: label, a stage's value ("" where it does not apply), and the words.
Row = tuple[str, Callable[[StageForecast], str], Callable[[Plan], str]]


def _says(text: str) -> Callable[[Plan], str]:
    return lambda plan: text


def _batch(stage: StageForecast) -> str:
    plan = stage.plan
    parts = f"{plan.world_size:,} x {plan.accumulation_steps} x {plan.micro_batch_size}"
    return parts if plan.global_batch_images == stage.config.global_batch_size else f"({parts})"


def _steps(stage: StageForecast) -> str:
    return f"{stage.plan.total_steps:,}" if stage.total_images is not None else _UNKNOWN


def _epochs(stage: StageForecast) -> str:
    images, each = stage.total_images, stage.shards.num_images
    return _UNKNOWN if images is None or each is None else _number(images / each)


def _time(show: Callable[[Any], str]) -> Callable[[StageForecast], str]:
    return lambda stage: show(stage.time) if stage.time else ""


def _sent(stage: StageForecast) -> str:
    sent = stage.own.traffic
    return show_bytes(sent.num_bytes) if sent and stage.plan.world_size > 1 else ""


def _sending(stage: StageForecast) -> str:
    sent, time = stage.own.traffic, stage.time
    if not sent or not time or stage.plan.world_size == 1:
        return ""
    return f"{1000 * sent.seconds:.3g} of {1000 * time.step_seconds:.3g}"


def _bytes_a_second(stage: StageForecast) -> str:
    needed = stage.reading
    return "" if not needed else _UNKNOWN if needed.bytes_per_second is None else show_bytes(needed.bytes_per_second)


def _cores(stage: StageForecast) -> str:
    needed = stage.reading
    return f"{needed.cores:.3g}" if needed else ""


def _cores_words(plan: Plan) -> str:
    assumed = [stage.reading.assumed_image_bytes for stage in plan.stages if stage.reading]
    sizes = dict.fromkeys(show_bytes(each) for each in assumed if each)
    of = f"images of {' and '.join(sizes)}, which is assumed" if sizes else "the bytes"
    return f"over all nodes; estimated from one benchmark and {of}"


def _kept(stage: StageForecast) -> str:
    counted = stage.own.traffic or stage.plan.world_size == 1  # else the links are not known
    return f"{stage.time.kept_share:.1%}" if stage.time and counted else ""


def _shards_each(stage: StageForecast) -> str:
    number = stage.shards.num_shards
    return _UNKNOWN if number is None else f"{number / stage.plan.world_size:.3g}"


def _mfu_words(plan: Plan) -> str:
    bases = dict.fromkeys(stage.time.speed.basis for stage in plan.stages if stage.time)
    return "of the GPU's peak: " + "; ".join(bases)


def _link_words(plan: Plan) -> str:
    links, gpu = plan.machine.links, plan.machine.gpu
    if links is None or gpu is None:
        return ""
    joined = f"{gpu.link} {links.near_bytes_per_second / 1e9:.0f}"
    if plan.machine.gpus > plan.gpus_per_node:
        joined += f", network {links.far_bytes_per_second / 1e9:.0f}"
    return f"ms of a step, mostly while it computes ({joined} GB/s)"


def _checkpoint_words(plan: Plan) -> str:
    each = (f"{stage.disk.most_checkpoints} of {show_bytes(stage.disk.checkpoint_bytes)}" for stage in plan.stages)
    return f"of disk, at most: {'; '.join(dict.fromkeys(each))}; one is in the making"


_ROWS: tuple[Row, ...] = (
    ("image size, px", lambda stage: str(stage.config.image_size), _says("a side")),
    ("parameters", lambda stage: short(stage.cost.parameters), _says("numbers that are learnt, head included")),
    (
        "FLOPs an image",
        lambda stage: short(stage.cost.training_flops),
        _says("arithmetic of its forward and backward pass"),
    ),
    ("global batch", lambda stage: f"{stage.config.global_batch_size:,}", _says("images of one optimizer step")),
    ("", _batch, _says("= GPUs x passes accumulated x images a GPU has in a pass")),
    ("steps", _steps, _says("of the optimizer")),
    (
        "images",
        lambda stage: _UNKNOWN if stage.total_images is None else short(stage.total_images),
        _says("seen in training"),
    ),
    ("epochs", _epochs, _says("times that each image is seen")),
    ("MFU", _time(lambda time: "" if time.speed.mfu is None else f"{time.speed.mfu:.1%}"), _mfu_words),
    ("images/s of one GPU", _time(lambda time: _number(time.speed.images_per_second)), _says("alone")),
    (
        "kept together",
        _kept,
        _says("of that speed; the rest is waiting for others or the processor"),
    ),
    ("images/s in all", _time(lambda time: _number(time.images_per_second)), _says("of all GPUs")),
    (
        "wall clock",
        _time(lambda time: _UNKNOWN if time.hours is None else show_duration(time.hours * 3600)),
        _says("evaluating, saving, starting and waiting for data come on top"),
    ),
    (
        "GPU-hours",
        _time(lambda time: _UNKNOWN if time.gpu_hours is None else _number(time.gpu_hours)),
        _says("what is paid for: hours x GPUs"),
    ),
    ("sent in a step", _sent, _says("by each GPU: gradients to average, new weights")),
    ("sending", _sending, _link_words),
    (
        "GPUs that pay",
        lambda stage: f"{stage.time.useful_gpus:,}" if stage.time and stage.own.traffic else "",
        _says(f"at most: of 1, 2, 4, ... the most that keep {GOOD_KEPT_SHARE:.0%} of their speed"),
    ),
    (
        "checkpoints",
        lambda stage: show_bytes(stage.disk.num_bytes),
        _checkpoint_words,
    ),
    ("shards a process", _shards_each, _says("on average; many spread better than few")),
    ("to be read, a second", _bytes_a_second, _says("from the shards, over all nodes")),
    ("cores to decode", _cores, _cores_words),
)


def _memory(plan: Plan, stage: StageForecast) -> Iterator[str]:
    """One GPU's memory under each ZeRO stage, without and with activation checkpointing."""
    gpu, images = plan.machine.gpu, stage.plan.micro_batch_size
    unit, name = (10**9, "GB") if stage.own.peak_bytes["all"] >= 10**9 else (10**6, "MB")
    show = _in_units(unit)
    usable = f" of {show_bytes(gpu.usable_bytes)}" if gpu else ""
    yield f"{stage.name}: {name} on one GPU{usable}, {images:,} images at a time; after a slash: with checkpointing"
    header = ["weights", "gradients", "optimizer", "passing", "activations", "at the peak"]
    header += ["fits", "most images"] if gpu else []
    header += ["sent a step", "kept"] if stage.own.traffic else []
    rows: list[tuple[str, list[str], str]] = [("", header, "")]
    for zero_stage, row in stage.memory.items():
        held, peaks, most = row.state, row.peak_bytes.values(), row.largest_micro_batch
        cells = [show(each) for each in (held.weights, held.gradients, held.optimizer, held.passing_bytes)]
        cells.append("/".join(show(each * images) for each in stage.image_bytes.values()))
        cells.append("/".join(map(show, peaks)))
        if gpu and most:
            cells.append("/".join("yes" if peak <= gpu.usable_bytes else "NO" for peak in peaks))
            cells.append("/".join(f"{number:,}" for number in most.values()))
        if row.traffic:
            cells += [show_bytes(row.traffic.num_bytes), f"{row.kept_share or 0:.0%}"]
        rows.append((_zero_name(stage, zero_stage), cells, ""))
    yield from columns(rows)


def _zero_name(stage: StageForecast, zero_stage: ZeroStage) -> str:
    if len(stage.memory) == 1:
        return "DDP"
    return f"ZeRO {zero_stage}" + (" *" if zero_stage == stage.zero_stage else "")


def _glossary(plan: Plan) -> Iterator[str]:
    yield from _wrapped(
        "MFU, model FLOPs utilisation: the share of a GPU's peak arithmetic that goes into the model; 40 to 50 % is "
        "good, 55 % is a record. FLOPs: additions and multiplications."
    )
    yield from _wrapped(
        "ZeRO: what the GPUs share out among them. 0 nothing, 1 the optimizer's numbers, 2 gradients too, 3 weights "
        "too; * is the recipe's. Passing: buffers, copies and gathered weights that a step needs for a while."
    )
    if plan.machine.gpu:
        gpu = plan.machine.gpu
        peak = gpu.peak_flops(plan.recipe.engine.precision) / 1e12
        yield from _wrapped(
            f"{gpu.name}: {peak:,.3g} TFLOP/s in {plan.recipe.engine.precision}, {show_bytes(gpu.memory_bytes)} "
            f"({gpu.source}), of which {RESERVE_SHARE:.0%} are kept free for CUDA, NCCL and gaps."
        )


def columns(rows: Sequence[tuple[str, Sequence[str], str]]) -> Iterator[str]:
    """Labels to the left, values right-aligned, words behind them, on several lines if they are long."""
    label_width = max(len(label) for label, _, _ in rows)
    widths = [max(len(values[n]) for _, values, _ in rows) for n in range(len(rows[0][1]))]
    for label, values, words in rows:
        cells = "  ".join(value.rjust(width) for value, width in zip(values, widths, strict=True))
        before = f"{label.ljust(label_width)}  {cells}  "
        first, *more = textwrap.wrap(words, max(_NARROWEST, _WIDTH - len(before))) or [""]
        yield (before + first).rstrip()
        yield from (" " * len(before) + line for line in more)


def _wrapped(text: str) -> list[str]:
    """Lines of at most `_WIDTH` characters, the later ones indented; none is broken within a word."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def short(number: float) -> str:
    """304326632 as "304.3 M"."""
    for size, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:#.4g}{prefix}"
    return f"{number:g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _in_units(unit: int) -> Callable[[int], str]:
    return lambda num_bytes: f"{num_bytes / unit:.2f}" if num_bytes < 100 * unit else f"{num_bytes / unit:.0f}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything of the page under the names of the code; seconds, bytes and shares as plain numbers."""
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


def _stage_json(stage: StageForecast) -> dict[str, Any]:
    return {
        "cost": asdict(stage.cost),
        "plan": asdict(stage.plan),
        "problem": stage.problem,
        "total_images": stage.total_images,
        "memory": {
            f"zero_{zero_stage}": {**asdict(row), "resting_bytes": row.state.resting_bytes}
            for zero_stage, row in stage.memory.items()
        },
        "time": stage.time and asdict(stage.time),
        "disk": {**asdict(stage.disk), "num_bytes": stage.disk.num_bytes},
        "shards": asdict(stage.shards),
        "reading": stage.reading and asdict(stage.reading),
    }
