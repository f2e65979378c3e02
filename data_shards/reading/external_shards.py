"""Turn indexed tars of other tools into a `ShardSet`, and refuse or report damaged and unusable samples.

Classes come from the user's file or from the labels: numbers give classes "0" to the highest, names are sorted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.indexing import Indexing
from shardvit.data_shards.reading.tar_summary import FoundLabels, TarSummary
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.location import is_local, local_path, redacted
from shardvit.data_shards.shards.shard_index import default_index_folder
from shardvit.data_shards.shards.shard_set import Damaged, Report, ShardSet, ShardsSpec, ShardTable
from shardvit.data_shards.text import parse_json
from shardvit.data_shards.vocabulary import SPLIT_FOLDERS

if TYPE_CHECKING:
    from shardvit.data_shards.store.store import Store

_MOST_CLASSES = 1_000_000  # more are identifiers or captions
_MOST_NAMES_OF_FEW_SAMPLES = 100


def open_external(
    spec: ShardsSpec,
    *,
    urls: Sequence[str],
    damaged: Damaged,
    index_folder: Path | None,
    report: Report,
    store: Store | None,
) -> ShardSet:
    """Open the tars `urls`, which have no manifest; arguments and errors as in `opening.open_shards`."""
    source = str(local_path(spec.location)) if is_local(spec.location) else redacted(spec.location)
    indexing = Indexing(spec, urls, source, index_folder or default_index_folder(), report, store)
    indexed = indexing.result()
    facts = [tar.facts for tar in indexed.tars]
    damage = [sentence for url, one in zip(urls, facts, strict=True) for sentence in _damage(redacted(url), one)]
    if damage and damaged == "refuse":
        more = f" (and {len(damage) - 1} more tars are damaged)" if len(damage) > 1 else ""
        raise UserError(f"{damage[0]}; copy or make it again{more}")
    used = [number for number, one in enumerate(facts) if one.num_samples]
    if not used:
        raise UserError(f"{source}: there are no samples in its tars: {damage[0] if damage else 'they are empty'}")
    if spec.classes is None:
        classes = found_classes(indexed.found, indexed.label, source=source)
    else:
        classes = read_classes(spec.classes)
        if unknown := unknown_label(indexed.found, classes, labels=indexed.label):
            sentence = f"{source}: the label {unknown} is not one of the {len(classes)} classes in {spec.classes}"
            if damaged == "refuse":
                raise UserError(f"{sentence}: add it there, or choose another file or label")
            damage.append(sentence)
    # Keys, image sizes, labels and classes in order, not pixels: a copy elsewhere has the same digest.
    content = [[facts[number].digest for number in used], classes, indexed.label.text, indexed.label.kind]
    return ShardSet(
        name=_name(source),
        source=source,
        split="all",
        classes=classes,
        shards=ShardTable.of_entries([indexing.entry(number, indexed.label, facts[number]) for number in used]),
        digest=hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32],
        damage=tuple(damage),
        lost_samples=sum(one.left_out for one in facts) + _cut_samples(facts),
    )


def read_classes(path: Path) -> tuple[str, ...]:
    """Read class names from a text file (one a line) or JSON (a list, or {name: number}); UserError for others."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = parse_json(text) if text.lstrip()[:1] in ("[", "{") else text.splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the list of classes cannot be read ({error})") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if isinstance(content, dict):
        numbers = list(content.values())
        if {*map(type, numbers)} != {int} or sorted(numbers) != [*range(len(content))]:
            raise UserError(f"{path}: the classes' numbers must be 0 to {len(content) - 1}, each once")
        content = sorted(content, key=content.__getitem__)
    elif text.lstrip()[:1] != "[":
        content = [line.strip() for line in content if line.strip()]
    if not content or not all(isinstance(name, str) for name in content):
        raise UserError(
            f"{path}: there should be one name of a class a line, a JSON list of names, or {{name: number}}"
        )
    first: dict[str, int] = {}
    for number, name in enumerate(content):
        if first.setdefault(name, number) != number or not name.isprintable():
            reason = "is there twice" if first[name] != number else "cannot be written"
            raise UserError(f"{path}: class {number}, {name!a} {reason}; give each class a name of its own")
    return tuple(content)


def _damage(name: str, summary: TarSummary) -> list[str]:
    sentences = [f"{name}: {summary.damage}"] if summary.damage else []
    if summary.damage and summary.num_samples:
        sentences[0] += f"; the {summary.num_samples:,} samples before that can be read"
    if summary.left_out:
        more = ", ..." if summary.left_out > len(summary.examples) else ""
        count = f"{summary.left_out:,} samples are" if summary.left_out > 1 else "1 sample is"
        sentences.append(f"{name}: {count} left out ({'; '.join(summary.examples)}{more})")
    return sentences


def _cut_samples(facts: Sequence[TarSummary]) -> int:
    """Estimate the samples lost by damaged tars: the tars of a set have one size, except the last."""
    sizes = [(one.num_samples + one.left_out, one.damage) for one in facts]
    usual = max((size for size, damage in sizes if not damage), default=0)
    return sum(max(1, usual - size) for size, damage in sizes if damage)


def found_classes(found: FoundLabels, labels: LabelSpec, *, source: str) -> tuple[str, ...]:
    """Name the classes of labels without a list of classes; UserError if they are no classes."""
    names, numbers_below = sorted(found.names), found.numbers_below
    if labels.part == "txt" and names and all(map(_is_number, names)):
        numbers_below, names = 1 + max(map(int, names)), []
    if names and numbers_below:
        raise UserError(
            f"{source}: its labels ({labels.text}) are numbers, such as {numbers_below - 1}, and names, such as "
            f"{names[0][:80]!r}: give classes, a file with the names in the numbers' order"
        )
    many = len(names) > _MOST_NAMES_OF_FEW_SAMPLES and 2 * len(names) > found.num_values
    if max(len(names), numbers_below) > _MOST_CLASSES or many:
        example = repr(names[0][:80]) if names else str(numbers_below - 1)
        raise UserError(
            f"{source}: {labels.text} seems to be no label but a caption or a number of the image ({example}): give "
            "another label, or the list of classes"
        )
    if not names and not numbers_below:
        raise UserError(f"{source}: no sample has any label in {labels.text}: give another label, or the classes")
    return tuple(names) or tuple(map(str, range(numbers_below)))


def unknown_label(found: FoundLabels, classes: tuple[str, ...], *, labels: LabelSpec) -> str:
    """Find a label that is not a class; "" if there is none."""
    for name in sorted(found.names - set(classes)):
        if not (labels.part == "txt" and _is_number(name) and int(name) < len(classes)):
            return repr(name[:80])
    return str(found.numbers_below - 1) if found.numbers_below > len(classes) else ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _name(source: str) -> str:
    """Name the set by its folder (a split with its parent's name), or by the common start of its tars' names."""
    *above, last = re.split(r"[/\\]", source.partition("::")[0].rstrip("/"))
    parts = [*filter(None, (*above, re.sub(r"[-_.]?(\{.*|\d*)\.tar$", "", last)))] or [last]
    return "-".join(parts[-2:] if parts[-1] in SPLIT_FOLDERS else parts[-1:])
