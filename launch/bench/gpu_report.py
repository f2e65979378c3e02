"""Format the results of `launch.bench.gpu`: ceilings, a row per contender, where a step's time goes, ours to others.

A row whose losses disagree with the bar's is void and enters no ratio. MFU is the model's FLOPs, by the product's own
accounting, over the data sheet's peak, and over this GPU's matrix products at these shapes.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardvit.launch.bench.gpu_meter import PHASES
from shardvit.launch.bench.gpu_work import SIZES
from shardvit.pipeline.budget.gpus import gpu_of_driver

_LOSS_TOLERANCE = 0.01  # of the bar's loss at step 1
_FALL_TOLERANCE = 0.10  # of the fall of the bar's loss by step 10
# Images/s, ours over theirs.
_LEAST_RATIOS = {"bar": 0.98, "deepspeed": 1.08, "timm-compile": 1.0, "timm": 1.25, "trainer": 1.15}
_LEAST_RATIO_TO_BAR = {"L/16@224 b64": 0.95}  # small batch: the optimizer takes a larger share
_MOST_MEMORY = 1.05  # ours over the bar's
_WANTED_MFU = 0.50
_MFU_SIZES = ("L/16@224 b256", "H/14@224 b128")


@dataclass(frozen=True)
class Machine:
    """The machine measured."""

    gpu: str | None  # as named by the driver; None: on a CPU
    versions: dict[str, str]


@dataclass
class GpuResults:
    """The JSON's content; `ceilings` and `outcomes` are as the processes wrote them."""

    machine: Machine
    ceilings: dict[str, Any] | None = None
    outcomes: list[dict[str, Any]] = field(default_factory=list)


class ContenderRow:
    """A measured contender."""

    def __init__(self, outcome: Mapping[str, Any]) -> None:
        self.outcome, self.measured = outcome, outcome["measured"]
        self.contender, self.size = outcome["contender"], outcome["size"]
        self.step_ms = statistics.median(self.measured["block_ms"])
        self.images_per_second = 1000 * SIZES[self.size].images / self.step_ms
        self.losses = [float(self.measured["losses"][step]) for step in ("1", "10")]


@dataclass(frozen=True)
class SpeedTarget:
    """One of our ratios and its bound."""

    what: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def rows_of(results: GpuResults) -> list[ContenderRow]:
    """The contenders that were measured."""
    return [ContenderRow(outcome) for outcome in results.outcomes if outcome["measured"] is not None]


def void(row: ContenderRow, *, bar: ContenderRow | None) -> str | None:
    """Say why a row does not count; None if its losses agree with the bar's or there is no bar."""
    if bar is None:
        return None
    (first, tenth), (bar_first, bar_tenth) = row.losses, bar.losses
    if not abs(first - bar_first) <= _LOSS_TOLERANCE * bar_first:
        return f"void: its first loss is {first:.4f}, the bar's {bar_first:.4f}"
    fall, bar_fall = first - tenth, bar_first - bar_tenth
    if not abs(fall - bar_fall) <= _FALL_TOLERANCE * abs(bar_fall):
        return f"void: its loss falls by {fall:.4f} in ten steps, the bar's by {bar_fall:.4f}"
    return None


def targets(rows: Sequence[ContenderRow], *, peak_flops: float | None) -> list[SpeedTarget]:
    """Compare ours at each size with the rows that are not void."""
    found: list[SpeedTarget] = []
    for size in dict.fromkeys(row.size for row in rows):
        here = [row for row in rows if row.size == size]
        bar = next((row for row in here if row.contender == "bar"), None)
        good = [row for row in here if void(row, bar=bar) is None]
        if not (ours := [row for row in good if row.contender == "ours"]):
            continue
        own = statistics.mean(row.images_per_second for row in ours)
        for name, least in _LEAST_RATIOS.items():
            if theirs := [row.images_per_second for row in good if row.contender == name]:
                bound = _LEAST_RATIO_TO_BAR.get(size, least) if name == "bar" else least
                found.append(SpeedTarget(f"{size}: images/s to {name}'s", own / statistics.mean(theirs), bound))
        if bar and bar.measured["peak_allocated_bytes"]:
            memory = ours[0].measured["peak_allocated_bytes"] / bar.measured["peak_allocated_bytes"]
            found.append(SpeedTarget(f"{size}: peak memory to bar's", memory, _MOST_MEMORY, at_least=False))
        if peak_flops and size in _MFU_SIZES:
            found.append(SpeedTarget(f"{size}: MFU", _flops(size) * own / peak_flops, _WANTED_MFU))
    return found


def report(results: GpuResults) -> Iterator[str]:
    """Format the tables."""
    machine, rows = results.machine, rows_of(results)
    gpu = gpu_of_driver(machine.gpu) if machine.gpu else None
    peak = gpu.peak_flops("bf16") if gpu else None
    libraries = ", ".join(f"{name} {each}" for name, each in machine.versions.items())
    yield f"{machine.gpu or 'no GPU: nothing here is a speed of one'}; {libraries}"
    if peak:
        yield f"peak in bf16 by the data sheet: {peak / 1e12:.0f} TFLOP/s"
    gemm: Mapping[str, float] = {}
    if results.ceilings:
        if "failure" in results.ceilings:
            yield f"ceilings: {results.ceilings['failure']}"
        else:
            gemm = results.ceilings["gemm_tflops"]
            yield from _ceilings(results.ceilings)
    for size in dict.fromkeys(outcome["size"] for outcome in results.outcomes):
        here = [row for row in rows if row.size == size]
        yield from _size(size, rows=here, results=results, peak=peak, gemm=gemm.get(size))
    found = targets(rows, peak_flops=peak)
    if found:
        yield "\nOurs" + ("" if machine.gpu else ", on a CPU, where the bounds do not apply")
    for each in found:
        sign = ">=" if each.at_least else "<="
        missed = "" if each.met or not machine.gpu else "  MISSED"
        yield f"  {each.what:52}{each.value:7.2f}  {sign} {each.bound:.2f}{missed}"


def _ceilings(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"\nCeilings\n  copy: {found['copy_gb_per_second']:,.0f} GB/s read and written"
    for size, products in found["products"].items():
        yield f"  matrix products of {size}, TFLOP/s: forward, input's gradient, weight's gradient"
        for each in products:
            values = (each[key] for key in ("forward", "input_gradient", "weight_gradient"))
            yield f"    {each['layer']:6}" + "".join(f"{value:9.1f}" for value in values)
        yield f"    all   {found['gemm_tflops'][size]:9.1f}"
    if note := found.get("note"):
        yield f"  {note}"
    if not found["attention"]:
        return
    names = list(found["attention"][0]["tflops"])
    yield "  attention, forward and backward, TFLOP/s" + "".join(f"{name:>11}" for name in names)
    for each in found["attention"]:
        values = "".join(f"{value:11.2f}" if value else f"{'-':>11}" for value in each["tflops"].values())
        yield f"    {each['tokens']:5} tokens, heads of {each['head']:3}           {values}"


def _size(
    size: str, *, rows: Sequence[ContenderRow], results: GpuResults, peak: float | None, gemm: float | None
) -> Iterator[str]:
    yield f"\n{size}: {_flops(size) / 1e9:,.1f} GFLOP of training an image"
    yield (
        f"  {'':13} images/s       ms  spread   MFU of GEMM  GB peak held   fwd   bwd  step  host kernels 1st s "
        "graphs breaks  loss 1 loss 10"
    )
    bar = next((row for row in rows if row.contender == "bar"), None)
    for row in rows:
        yield f"  {row.contender:13}" + _cells(row, peak=peak, gemm=gemm)
        if why := void(row, bar=bar):
            yield f"    {why}"
        if note := row.outcome.get("note"):
            yield f"    {note}"
    for outcome in results.outcomes:
        if outcome["size"] == size and outcome["failure"]:
            yield f"  {outcome['contender']:13}{outcome['failure']}"
    bars = [row.step_ms for row in rows if row.contender == "bar"]
    if len(bars) > 1:
        yield f"  the bar's turns differ by {(max(bars) - min(bars)) / statistics.mean(bars):.1%}"
    for row in rows:
        if split := row.measured["split"]:
            shares = sorted(split["shares"].items(), key=lambda each: -each[1])
            yield f"  {row.contender:13}" + ", ".join(f"{kind} {share:.1%}" for kind, share in shares)
            yield f"  {'':13}attention by {split['attention_kernel'] or 'no kernel that is known'}"


def _cells(row: ContenderRow, *, peak: float | None, gemm: float | None) -> str:
    measured, blocks = row.measured, row.measured["block_ms"]
    flops = _flops(row.size) * row.images_per_second
    memory = [measured[key] and measured[key] / 1e9 for key in ("peak_allocated_bytes", "peak_reserved_bytes")]
    phases = [measured["phase_ms"].get(name) for name in PHASES]
    return (
        f"{row.images_per_second:9,.1f}{row.step_ms:9.2f}{(max(blocks) - min(blocks)) / row.step_ms:8.1%}"
        + _cell(peak and flops / peak, "6.1%")
        + _cell(gemm and flops / gemm / 1e12, "8.1%")
        + "".join(_cell(each, "7.1f") for each in memory)
        + "".join(_cell(each, "6.1f") for each in phases)
        + _cell(measured["host_ms"], "6.1f")
        + _cell(measured["split"] and measured["split"]["kernels"], "8,.0f")
        + f"{measured['first_step_seconds']:6.1f}{row.outcome['graphs']:7}{row.outcome['graph_breaks']:7}"
        + f"{row.losses[0]:8.4f}{row.losses[1]:8.4f}"
    )


def _cell(value: float | None, form: str) -> str:
    return format(value, form) if value else f"{'-':>{form[0]}}"


def _flops(size: str) -> int:
    return SIZES[size].account.training_flops
