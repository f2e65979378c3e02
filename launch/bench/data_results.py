"""Results of the data benchmark, its targets, and both as text. Arithmetic and text only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.bench.data_methods import METHODS, OURS, OURS_RESIZED, STOCK
from launch.bench.measure import median_ratio

# The targets of the project's third issue. The yardsticks were first measured on a Cascade Lake of 2.5 GHz, where
# stock took 6.9 ms an image; ratios between methods differ by up to a third from one kind of CPU to another.
TRANSFORM_TO_STOCK, PSNR_DECIBELS = 2.8, 55.0
LOADER_CPU_SHARE, RESIZED_TO_STOCK = 0.3, 5.0
RESUME_SECONDS = 2.0
MEMORY_GROWTH = 0.03  # what the allocator does from one epoch to the next


@dataclass(frozen=True)
class LoaderRound:
    """One loader in one round, in a process of its own."""

    cpu_ms: float  # per image, of all its processes, between the marks `go` and `end`
    images_per_second: float  # likewise
    first_seconds: float  # from the start of the process to its first batch, imports included
    peak_pss_mib: float  # of all processes together
    processes: int


@dataclass(frozen=True)
class Target:
    """One target, and whether it is met."""

    text: str
    measured: str
    met: bool


@dataclass
class Results:
    """Everything that was measured; a part that was not asked for is empty."""

    setting: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    transform_ms: dict[str, list[float]] = field(default_factory=dict)
    psnr: dict[str, float] = field(default_factory=dict)
    loaders: dict[str, list[LoaderRound]] = field(default_factory=dict)
    resume: list[dict[str, float]] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)  # after each tenth of an epoch


def find_targets(results: Results) -> list[Target]:
    """The targets that these results can be held to."""
    return [*_transform_targets(results), *_loader_targets(results), *_other_targets(results)]


def _transform_targets(results: Results) -> Iterator[Target]:
    costs = results.transform_ms
    if costs:
        ratio = median_ratio(costs["stock"], costs["ours"])
        yield _at_least("training transform to stock torchvision", ratio, TRANSFORM_TO_STOCK, unit="x")
    if results.psnr:
        yield _at_least("pixels of the worst image, PSNR", results.psnr["worst"], PSNR_DECIBELS, unit=" dB")


def _loader_targets(results: Results) -> Iterator[Target]:
    loaders = results.loaders
    if OURS in loaders and STOCK in loaders:
        yield _at_most("loader, CPU per image to stock", _cpu_ratio(loaders, OURS, STOCK), LOADER_CPU_SHARE)
    if OURS_RESIZED in loaders and STOCK in loaders:
        ratio = _cpu_ratio(loaders, STOCK, OURS_RESIZED)
        yield _at_least("loader on resized shards to stock on the originals", ratio, RESIZED_TO_STOCK, unit="x")
    peers = [name for name in loaders if METHODS[name].batches is not None]
    if OURS not in loaders or not peers:
        return
    nearest = max(peers, key=lambda name: _cpu_ratio(loaders, OURS, name))
    share = _cpu_ratio(loaders, OURS, nearest)
    yield Target(f"loader, CPU per image below every peer (nearest: {nearest})", f"{share:.2f} of it", share < 1)
    for text, values in (
        ("peak PSS, MiB", _peak_pss),
        ("seconds to the first batch", _first_seconds),
        ("processes", _processes),
    ):
        best = min(peers, key=lambda name: values(loaders[name]))
        ours, theirs = values(loaders[OURS]), values(loaders[best])
        yield Target(f"{text}: no more than the best peer ({best})", f"{ours:.4g} to {theirs:.4g}", ours <= theirs)


def _other_targets(results: Results) -> Iterator[Target]:
    if results.resume:
        slowest = max(each["first_seconds"] for each in results.resume)
        yield _at_most("resume in 1,000 shards, slowest position", slowest, RESUME_SECONDS, unit=" s")
    if results.memory_mib:
        first, last = _epochs(results.memory_mib)[0], _epochs(results.memory_mib)[-1]
        growth = statistics.median(last) / statistics.median(first) - 1
        yield _at_most("memory, last epoch over the first", growth, MEMORY_GROWTH)


def report_lines(results: Results) -> list[str]:
    """The whole report."""
    sections: list[Callable[[Results], Sequence[str]]] = [
        _transform_lines, _loader_lines, _resume_lines, _memory_lines, _target_lines,
    ]  # fmt: skip
    lines = [f"{name}: {value}" for name, value in results.setting.items() if name != "versions"]
    lines.append("versions: " + ", ".join(f"{name} {value}" for name, value in results.setting["versions"].items()))
    lines += [f"skipped: {name}: {reason}" for name, reason in results.skipped.items()]
    for section in sections:
        text = section(results)
        if text:
            lines += ["", *text]
    return lines


def _transform_lines(results: Results) -> list[str]:
    costs = results.transform_ms
    if not costs:
        return []
    labels = {
        "stock": "torchvision on Pillow, bicubic, float32",
        "ours": "ours, uint8 (flip and normalisation are the device's)",
        "decode": "of that, decoding the box (the rest is the resize)",
    }
    rows = [("transform, one core", "ms/image", "images/s", "to stock")]
    for name, values in costs.items():
        cost = statistics.median(values)
        rows.append((labels[name], f"{cost:.2f}", f"{1000 / cost:.0f}", f"{median_ratio(costs['stock'], values):.2f}"))
    psnr = ", ".join(f"{name} {value:.1f}" for name, value in results.psnr.items())
    return [*_table(rows), f"pixels against full decode and float resize, PSNR in dB: {psnr}"]


def _loader_lines(results: Results) -> list[str]:
    if not results.loaders:
        return []
    rows = [("loader, two workers", "CPU ms/image", "to stock", "images/s", "PSS MiB", "first s", "processes")]
    for name, rounds in results.loaders.items():
        to_stock = f"{_cpu_ratio(results.loaders, STOCK, name):.2f}" if STOCK in results.loaders else ""
        rows.append(
            (
                f"{name}: {METHODS[name].label}",
                f"{_cpu_ms(rounds):.2f}",
                to_stock,
                f"{statistics.median(each.images_per_second for each in rounds):.0f}",
                f"{_peak_pss(rounds):.0f}",
                f"{_first_seconds(rounds):.1f}",
                f"{_processes(rounds):.0f}",
            )
        )
    return _table(rows)


def _resume_lines(results: Results) -> list[str]:
    if not results.resume:
        return []
    rows = [("resume in 1,000 shards, at step", "first batch s", "without imports s")]
    rows += [
        (f"{each['step']:,.0f}", f"{each['first_seconds']:.2f}", f"{each['after_imports_seconds']:.2f}")
        for each in results.resume
    ]
    return _table(rows)


def _memory_lines(results: Results) -> list[str]:
    rows = [("memory of ours, PSS MiB, after", *(f"{tenth}0 %" for tenth in range(1, 11)))]
    for number, epoch in enumerate(_epochs(results.memory_mib), start=1):
        rows.append((f"epoch {number}", *(f"{value:.0f}" for value in epoch)))
    return _table(rows) if results.memory_mib else []


def _target_lines(results: Results) -> list[str]:
    rows = [("target", "wanted and measured", "")]
    rows += [(each.text, each.measured, "met" if each.met else "MISSED") for each in find_targets(results)]
    return _table(rows) if len(rows) > 1 else []


def _at_least(text: str, value: float, bound: float, *, unit: str = "") -> Target:
    return Target(text, f">= {bound:g}{unit}: {value:.2f}", value >= bound)


def _at_most(text: str, value: float, bound: float, *, unit: str = "") -> Target:
    return Target(text, f"<= {bound:g}{unit}: {value:.2f}", value <= bound)


def _cpu_ms(rounds: Sequence[LoaderRound]) -> float:
    return statistics.median(each.cpu_ms for each in rounds)


def _peak_pss(rounds: Sequence[LoaderRound]) -> float:
    return statistics.median(each.peak_pss_mib for each in rounds)


def _first_seconds(rounds: Sequence[LoaderRound]) -> float:
    return statistics.median(each.first_seconds for each in rounds)


def _processes(rounds: Sequence[LoaderRound]) -> float:
    return max(each.processes for each in rounds)


def _cpu_ratio(loaders: Mapping[str, Sequence[LoaderRound]], over: str, under: str) -> float:
    """CPU per image of one loader over another's, median of the rounds."""
    return median_ratio(*([each.cpu_ms for each in loaders[name]] for name in (over, under)))


def _epochs(tenths: Sequence[float]) -> list[Sequence[float]]:
    return [tenths[first : first + 10] for first in range(0, len(tenths), 10)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
