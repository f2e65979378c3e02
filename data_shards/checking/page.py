"""Format a check's result as text and as JSON.

JSON keys are stable: those of `as_json`, and the fields of `SplitSummary`, `Fitness`, `Finding` and `FoundAt`. New ones
may be added; `version` changes if one is removed or redefined. A finding names at most 1,000 places.
"""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from shardvit.data_shards.checking.check import CheckResult
from shardvit.data_shards.checking.findings import Finding
from shardvit.data_shards.checking.fitness import describe
from shardvit.data_shards.checking.judge import SplitSummary, Spread
from shardvit.data_shards.checking.near_duplicates.fingerprint import Collection, ShardImages
from shardvit.data_shards.checking.near_duplicates.matches import MATCH_KINDS, Matches
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.text import counted, one_line, printable, show_bytes, show_duration, table

_VERSION = 1
_WIDTH = 100
_SHOWN_PLACES = 8  # per finding; the JSON has all
_SHOWN_CLASSES = 20  # with more, only the extremes are shown
_BAR = 32  # characters
_RARE = 3  # classes named as rarest, and as largest
_RATE = 1000  # images/s to state the cores for


def as_json(result: CheckResult) -> dict[str, Any]:
    """Convert to plain types."""
    return {
        "version": _VERSION,
        "location": result.location,
        "ok": result.exit_code == 0,
        "problems": result.count("problem"),
        "warnings": result.count("warning"),
        "seconds": round(result.seconds, 3),
        "splits": [asdict(split) for split in result.splits],
        "fitness": None if result.fitness is None else asdict(result.fitness),
        "against": [counts for matches in result.matches for counts in _against(matches)],
        "findings": [
            {**asdict(finding), "places": [place._asdict() for place in finding.places]} for finding in result.findings
        ],
    }


def _against(found: Matches) -> list[dict[str, Any]]:
    counts = Counter((match.collection, match.kind) for match in found.matches)
    keys = ("equal_bytes", "equal_pixels", "near_duplicates", "unsure")
    return [
        {"split": _shards(found.images).split, "source": other.name, "digest": _shards(other).digest}
        | {key: counts[number, kind] for key, kind in zip(keys, MATCH_KINDS, strict=False)}
        for number, other in enumerate(found.others)
    ]


def _shards(collection: Collection) -> ShardSet:
    assert isinstance(collection, ShardImages)
    return collection.shards


def as_text(result: CheckResult) -> str:
    """Format figures, findings with remedies, and the verdict as the last line."""
    blocks = [_split_text(split) for split in result.splits]
    if result.fitness is not None:
        fitness = result.fitness
        nodes = f" on {fitness.nodes} nodes of {fitness.processes_per_node}" if fitness.nodes > 1 else " on one node"
        blocks.append(f"for {fitness.world_size} processes{nodes}\n{_rows(describe(fitness))}")
    splits = {split.split for split in result.splits} | {finding.split for finding in result.findings}
    blocks += [_finding_text(finding, only_split=len(splits) == 1) for finding in result.findings]
    counts = [(result.count("problem"), "problem"), (result.count("warning"), "warning")]
    found = ", ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts if count) or "all is well"
    return printable("\n\n".join([*blocks, f"check: {found} ({show_duration(result.seconds)})"]))


def _split_text(split: SplitSummary) -> str:
    stated = f" ({split.samples_stated:,} are stated)" if split.samples != split.samples_stated else ""
    formats = ", ".join(f"{count:,} {name}" for name, count in split.formats.items()) or "none readable"
    if len(split.formats) == 1:
        (formats,) = split.formats
    rows = [
        ("images", f"{split.samples:,}{stated} in {counted(split.shards, 'shard')}, {show_bytes(split.bytes)}"),
        ("a shard", f"{_range(split.samples_per_shard, unit=' images')}, {_bytes_range(split.bytes_per_shard)}"),
        ("an image", f"{_bytes_range(split.bytes_per_image)}; {formats}"),
    ]
    if split.decode_ms is not None:
        cores = split.decode_ms * _RATE / 1000
        rate = f"{cores:.2g} core{'s' * (cores != 1)} for {_RATE:,} images/s (training decodes a part, resizes it)"
        rows += [
            ("pixels", f"width {_range(split.width)}, height {_range(split.height)}"),
            ("decoding", f"{split.decode_ms:.2g} ms an image on one core: {rate}"),
        ]
    title = one_line(f"{split.split or split.name}: {split.source}")
    return f"{title}\n{_rows([*rows, *_class_rows(split)])}"


def _class_rows(split: SplitSummary) -> list[tuple[str, str]]:
    counts = split.classes
    if not counts:
        return []
    kind = "labels, several an image" if split.multi_label else "images"
    ordered = sorted(counts, key=lambda name: counts[name])
    least, median, most = (counts[ordered[at]] for at in (0, len(ordered) // 2, -1))
    if len(counts) <= _SHOWN_CLASSES:
        bars = {name: "#" * round(_BAR * count / max(1, most)) for name, count in counts.items()}
        lines = table([(_short(name), f"{counts[name]:,}", bar) for name, bar in bars.items()], align="lrl").split("\n")
        return [("" if number else "classes", line) for number, line in enumerate(lines)]
    if least == most:
        return [("classes", f"{len(counts):,}, {most:,} {kind} each")]
    empty = sum(not count for count in counts.values())
    ratio = f"{empty:,} have none" if empty else f"most to least {most / least:.3g} to 1"
    rows = [("classes", f"{len(counts):,}, {least:,} to {most:,} {kind} each (median {median:,}); {ratio}")]
    for label, names in (("  rarest", ordered[:_RARE]), ("  largest", ordered[: -_RARE - 1 : -1])):
        rows.append((label, ", ".join(f"{_short(name)} {counts[name]:,}" for name in names)))
    return rows


def _finding_text(finding: Finding, *, only_split: bool) -> str:
    where = "" if only_split or not finding.split else f"{finding.split}: "
    severity = {"problem": "PROBLEM", "warning": "warning", "info": "note"}[finding.severity]
    lines = [one_line(f"{severity}  {where}{finding.message}")]
    shown = finding.places[: _SHOWN_PLACES if len(finding.places) > _SHOWN_PLACES + 1 else None]
    columns = [column for column in zip(*shown, strict=True) if any(column)]
    if columns:
        lines.append(table([[one_line(cell) for cell in row] for row in zip(*columns, strict=True)], indent="    "))
    left = max(finding.count, len(finding.places)) - len(shown)
    if shown and left > 0:
        lines.append(f"    ... and {left:,} more (--json lists them)")
    if finding.remedy:
        lines += textwrap.wrap(finding.remedy, _WIDTH, initial_indent="  -> ", subsequent_indent="     ")
    return "\n".join(lines)


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"  {label:<10}{text}" for label, text in rows)


def _range(spread: Spread | None, *, unit: str = "", show: Callable[[float], str] = "{:,.0f}".format) -> str:
    if spread is None:
        return f"no{unit}"
    if spread.min == spread.max:
        return f"{show(spread.max)}{unit}"
    return f"{show(spread.min)} to {show(spread.max)}{unit} (median {show(spread.median)})"


def _bytes_range(spread: Spread | None) -> str:
    return "of no size" if spread is None else _range(spread, show=show_bytes)


def _short(name: str) -> str:
    name = one_line(name)
    return name if len(name) <= 40 else name[:37] + "..."
