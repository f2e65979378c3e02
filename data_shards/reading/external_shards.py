"""Indexed tars of other tools -> `ShardSet`: its classes, and what to do about damage.

Classes come from the user's file or from the labels: numbers give classes "0" to the highest, names are sorted. Damaged
or unusable samples are refused, or reported in `damage`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_shards.errors import UserError
from data_shards.reading.indexing import Indexed, Indexing, Tar
from data_shards.reading.tar_summary import FoundLabels
from data_shards.shards.labels import LabelSpec
from data_shards.shards.location import is_local, local_path, redacted
from data_shards.shards.shard_index import default_index_folder
from data_shards.shards.shard_set import Damaged, Report, ShardSet, ShardsSpec
from data_shards.text import parse_json
from data_shards.vocabulary import SPLIT_FOLDERS

if TYPE_CHECKING:
    from data_shards.store.store import Store

_MOST_CLASSES = 1_000_000  # far beyond any list of classes: then it is an identifier, or a caption
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
    """Open the tars `urls`, which have no manifest; arguments and errors as for `opening.open_shards`."""
    source = str(local_path(spec.location)) if is_local(spec.location) else redacted(spec.location)
    indexed = Indexing(spec, urls, source, index_folder or default_index_folder(), report, store).result()
    damage = [sentence for tar in indexed.tars for sentence in _damage(tar)]
    if damage and damaged == "refuse":
        more = f" (and {len(damage) - 1} more tars are damaged)" if len(damage) > 1 else ""
        raise UserError(f"{damage[0]}; copy or make it again{more}")
    used = tuple(tar for tar in indexed.tars if tar.facts.num_samples)
    if not used:
        reason = damage[0] if damage else "they are empty"
        raise UserError(f"{source}: there are no samples in its tars: {reason}")
    if spec.classes is None:
        classes = _found_classes(indexed, source=source)
    else:
        classes = read_classes(spec.classes)
        unknown = _unknown(indexed.found, classes, labels=indexed.labels)
        if unknown:
            sentence = f"{source}: the label {unknown} is not one of the {len(classes)} classes in {spec.classes}"
            if damaged == "refuse":
                raise UserError(f"{sentence}: add it there, or choose another file or label")
            damage.append(sentence)
    return ShardSet(
        name=_name(source),
        source=source,
        split="all",
        classes=classes,
        shards=tuple(tar.entry for tar in used),
        digest=_digest(used, classes, indexed.labels),
        damage=tuple(damage),
        lost_samples=sum(tar.facts.left_out for tar in indexed.tars) + _cut_samples(indexed.tars),
    )


def read_classes(path: Path) -> tuple[str, ...]:
    """Class names from a text file (one a line) or JSON (a list, or {name: number}).

    Raises UserError if it cannot be read, names a class twice, or its numbers are not 0, 1, 2, ...
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the list of classes cannot be read ({error})") from None
    if text.lstrip()[:1] in ("[", "{"):
        try:
            content = parse_json(text)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
        if isinstance(content, dict):
            if {type(number) for number in content.values()} != {int} or sorted(content.values()) != [
                *range(len(content))
            ]:
                raise UserError(f"{path}: the classes' numbers must be 0 to {len(content) - 1}, each once")
            content = sorted(content, key=content.__getitem__)
    else:
        content = [line.strip() for line in text.splitlines() if line.strip()]
    if not content or not all(isinstance(name, str) for name in content):
        raise UserError(
            f"{path}: there should be one name of a class a line, a JSON list of names, or {{name: number}}"
        )
    seen: set[str] = set()
    for name in content:
        if name in seen:
            raise UserError(f"{path}: the class {name!r} is there twice")
        seen.add(name)
    return tuple(content)


def _damage(tar: Tar) -> list[str]:
    facts, name = tar.facts, tar.entry.name
    sentences = [f"{name}: {facts.damage}"] if facts.damage else []
    if facts.damage and facts.num_samples:
        sentences[0] += f"; the {facts.num_samples:,} samples before that can be read"
    if facts.left_out:
        more = ", ..." if facts.left_out > len(facts.examples) else ""
        count = f"{facts.left_out:,} samples are" if facts.left_out > 1 else "1 sample is"
        sentences.append(f"{name}: {count} left out ({'; '.join(facts.examples)}{more})")
    return sentences


def _cut_samples(tars: Sequence[Tar]) -> int:
    """Estimate of the samples that damaged tars have lost: the tars of one set, except the last, have one size."""
    whole = [tar.facts.num_samples + tar.facts.left_out for tar in tars if not tar.facts.damage]
    cut = [tar.facts.num_samples + tar.facts.left_out for tar in tars if tar.facts.damage]
    usual = max(whole, default=0)
    return sum(max(1, usual - found) for found in cut)


def _found_classes(indexed: Indexed, *, source: str) -> tuple[str, ...]:
    found, labels = indexed.found, indexed.labels
    names = sorted(found.names)
    numbers_below = found.numbers_below
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


def _unknown(found: FoundLabels, classes: tuple[str, ...], *, labels: LabelSpec) -> str:
    """A label that is not a class; "" if all are."""
    for name in sorted(found.names - set(classes)):
        if not (labels.part == "txt" and _is_number(name) and int(name) < len(classes)):
            return repr(name[:80])
    return str(found.numbers_below - 1) if found.numbers_below > len(classes) else ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _digest(tars: Sequence[Tar], classes: tuple[str, ...], labels: LabelSpec) -> str:
    """Of keys, image sizes, labels and classes, in order: the same for a copy elsewhere. Pixels do not count."""
    content = [[tar.facts.digest for tar in tars], classes, labels.text, labels.kind]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _name(source: str) -> str:
    """The set's folder, of a split with the folder above, or the common beginning of its tars' names."""
    *above, last = re.split(r"[/\\]", source.partition("::")[0].rstrip("/"))
    parts = [*filter(None, (*above, re.sub(r"[-_.]?(\{.*|\d*)\.tar$", "", last)))] or [last]
    return "-".join(parts[-2:] if parts[-1] in SPLIT_FOLDERS else parts[-1:])
