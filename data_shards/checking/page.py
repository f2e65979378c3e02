"""The result of a check as text for people, and as JSON for programs.

The keys of the JSON are stable; new ones may be added (`version` changes if any is removed or changes its meaning):

    version             1
    location            what was checked
    ok                  true without problems, as the exit code 0
    problems, warnings  how many findings of each
    seconds             that it took
    splits              a list of
        split, name, source, digest
        samples             that were found; samples_stated: that the manifest states
        shards, bytes       of all tars
        multi_label         whether a sample has a list of labels
        classes             {name: samples}, in the order of the class numbers
        samples_per_shard, bytes_per_shard, bytes_per_image     {min, median, max}, or null where there are none
        formats             {format: images}
        height, width       {min, median, max} in pixels, or null without --decode
        decode_ms           CPU time for one image on one core, or null
    fitness             null, or world_size, nodes, processes_per_node, lanes, fitting_world_sizes, images_per_process,
                        shards_per_process, shards_per_node ([least, most] each), node_share, node_bytes, window_shards,
                        window_bytes
    findings            a list of
        severity            "problem", "warning" or "info"
        kind                see findings.Kind
        split               "train", ..., "train and val"
        count               how often
        message, remedy     sentences
        places              a list of {shard, key, detail}, at most 1,000
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from data_shards.checking.check import CheckResult
from data_shards.checking.findings import Finding, Place
from data_shards.checking.fitness import describe
from data_shards.checking.split import SplitSummary, Spread
from data_shards.text import one_line, printable, show_bytes, show_duration

_VERSION = 1
_WIDTH = 100
_SHOWN_PLACES = 8  # of a finding; all are in the JSON
_SHOWN_CLASSES = 20  # up to which each has its line
_BAR = 32  # characters
_RARE = 3  # classes that are named as the rarest and the most frequent
_RATE = 1000  # images/s that the cores are told for


def as_json(result: CheckResult) -> dict[str, Any]:
    """The result as described above."""
    return {
        "version": _VERSION,
        "location": result.location,
        "ok": result.exit_code == 0,
        "problems": result.count("problem"),
        "warnings": result.count("warning"),
        "seconds": round(result.seconds, 3),
        "splits": [_split_json(split) for split in result.splits],
        "fitness": None if result.fitness is None else asdict(result.fitness),
        "findings": [
            {**asdict(finding), "places": [place._asdict() for place in finding.places]} for finding in result.findings
        ],
    }


def _split_json(split: SplitSummary) -> dict[str, Any]:
    return {
        "split": split.split,
        "name": split.name,
        "source": split.source,
        "digest": split.digest,
        "samples": split.num_samples,
        "samples_stated": split.num_stated,
        "shards": split.num_shards,
        "bytes": split.num_bytes,
        "multi_label": split.is_multi_label,
        "classes": dict(zip(split.classes, split.class_counts, strict=True)),
        "samples_per_shard": _spread_json(split.shard_samples),
        "bytes_per_shard": _spread_json(split.shard_bytes),
        "bytes_per_image": _spread_json(split.image_bytes),
        "formats": split.formats,
        "height": _spread_json(split.heights),
        "width": _spread_json(split.widths),
        "decode_ms": split.decode_ms,
    }


def _spread_json(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    numbers = {"min": spread.least, "median": spread.median, "max": spread.most}
    return {name: int(number) if number.is_integer() else number for name, number in numbers.items()}


def as_text(result: CheckResult) -> str:
    """The result for people: what there is, what was found and what to do, and the verdict as the last line."""
    blocks = [_split_text(split) for split in result.splits]
    if result.fitness is not None:
        fitness = result.fitness
        nodes = f" on {fitness.nodes} nodes of {fitness.processes_per_node}" if fitness.nodes > 1 else " on one node"
        blocks.append(_table(f"for {fitness.world_size} processes{nodes}", describe(fitness)))
    splits = {split.split for split in result.splits} | {finding.split for finding in result.findings}
    blocks += [_finding_text(finding, only_split=len(splits) == 1) for finding in result.findings]
    return printable("\n\n".join([*blocks, verdict(result)]))


def verdict(result: CheckResult) -> str:
    """One line: "check: 2 problems, 1 warning"."""
    counts = [(result.count("problem"), "problem"), (result.count("warning"), "warning")]
    parts = [f"{count} {name}{'s' * (count != 1)}" for count, name in counts if count]
    found = ", ".join(parts) or "all is well"
    return f"check: {found} ({show_duration(result.seconds)})"


def _split_text(split: SplitSummary) -> str:
    lost = f" ({split.num_stated:,} are stated)" if split.num_samples != split.num_stated else ""
    rows = [
        ("images", f"{split.num_samples:,}{lost} in {split.num_shards:,} shards, {show_bytes(split.num_bytes)}"),
        ("a shard", f"{_range(split.shard_samples, unit=' images')}, {_bytes_range(split.shard_bytes)}"),
        ("an image", f"{_bytes_range(split.image_bytes)}; {_formats(split.formats)}"),
    ]
    if split.heights is not None and split.widths is not None and split.decode_ms is not None:
        cores = split.decode_ms * _RATE / 1000
        rate = f"{cores:.2g} core{'s' * (cores != 1)} for {_RATE:,} images/s (training decodes a part, resizes it)"
        rows += [
            ("pixels", f"width {_range(split.widths)}, height {_range(split.heights)}"),
            ("decoding", f"{split.decode_ms:.2g} ms an image on one core: {rate}"),
        ]
    title = one_line(f"{split.split or split.name}: {split.source}")
    return "\n".join([_table(title, rows), *_classes_text(split)])


def _classes_text(split: SplitSummary) -> list[str]:
    counts = dict(zip(split.classes, split.class_counts, strict=True))
    kind = "labels, several an image" if split.is_multi_label else "images"
    if not counts:
        return []
    if len(counts) <= _SHOWN_CLASSES:
        width = max(len(_short(name)) for name in counts)
        most = max(1, *counts.values())
        numbers = max(len(f"{count:,}") for count in counts.values())
        lines = [
            f"  {'classes' if i == 0 else '':<10}{_short(name):<{width}}  {count:>{numbers},}  "
            f"{'#' * round(_BAR * count / most)}".rstrip()
            for i, (name, count) in enumerate(counts.items())
        ]
        return lines
    ordered = sorted(counts, key=lambda name: counts[name])
    least, median, most = (counts[ordered[at]] for at in (0, len(ordered) // 2, -1))
    if least == most:
        return [f"  {'classes':<10}{len(counts):,}, {most:,} {kind} each"]
    empty = sum(not count for count in counts.values())
    ratio = f"{empty:,} have none" if empty else f"most to least {most / least:.3g} to 1"
    rows = [("classes", f"{len(counts):,}, {least:,} to {most:,} {kind} each (median {median:,}); {ratio}")]
    for label, names in (("  rarest", ordered[:_RARE]), ("  largest", ordered[: -_RARE - 1 : -1])):
        rows.append((label, ", ".join(f"{_short(name)} {counts[name]:,}" for name in names)))
    return [f"  {label:<10}{text}" for label, text in rows]


def _finding_text(finding: Finding, *, only_split: bool) -> str:
    where = "" if only_split or not finding.split else f"{finding.split}: "
    severity = {"problem": "PROBLEM", "warning": "warning", "info": "note"}[finding.severity]
    lines = [one_line(f"{severity}  {where}{finding.message}")]
    shown = finding.places[: _SHOWN_PLACES if len(finding.places) > _SHOWN_PLACES + 1 else None]
    lines += _places_text(shown)
    left = max(finding.count, len(finding.places)) - len(shown)
    if shown and left > 0:
        lines.append(f"    ... and {left:,} more (--json lists them)")
    if finding.remedy:
        lines += textwrap.wrap(finding.remedy, _WIDTH, initial_indent="  -> ", subsequent_indent="     ")
    return "\n".join(lines)


def _places_text(places: Sequence[Place]) -> list[str]:
    places = [Place(*map(one_line, place)) for place in places]
    shard_width = max((len(place.shard) for place in places if place.key or place.detail), default=0)
    key_width = max((len(place.key) for place in places if place.detail), default=0)
    lines = []
    for place in places:
        cells = [f"{place.shard:<{shard_width}}"] * (shard_width > 0 or bool(place.shard))
        cells += [f"{place.key:<{key_width}}"] * (key_width > 0 or bool(place.key))
        lines.append("    " + "  ".join([*cells, place.detail]).rstrip())
    return lines


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join([title, *(f"  {label:<10}{text}" for label, text in rows)])


def _range(spread: Spread | None, *, unit: str = "") -> str:
    if spread is None:
        return f"no{unit}"
    if spread.least == spread.most:
        return f"{spread.most:,.0f}{unit}"
    return f"{spread.least:,.0f} to {spread.most:,.0f}{unit} (median {spread.median:,.0f})"


def _bytes_range(spread: Spread | None) -> str:
    if spread is None:
        return "of no size"
    if spread.least == spread.most:
        return show_bytes(spread.most)
    return f"{show_bytes(spread.least)} to {show_bytes(spread.most)} (median {show_bytes(spread.median)})"


def _formats(formats: dict[str, int]) -> str:
    if len(formats) == 1:
        return next(iter(formats))
    return ", ".join(f"{count:,} {name}" for name, count in formats.items()) or "none readable"


def _short(name: str) -> str:
    name = one_line(name)
    return name if len(name) <= 40 else name[:37] + "..."
