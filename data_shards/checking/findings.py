"""What a check can find: the kinds, how bad each is, what it means and what to do about it.

A problem is damage, or data that make results wrong without a word: exit code 1. A warning is worth knowing before
training, which goes well all the same. The names of the kinds are what `--json` is keyed by: they stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["problem", "warning", "info"]
Kind = Literal[
    "unusable-set",
    "damage",
    "missing-shard",
    "unreachable-shard",
    "damaged-shard",
    "digest",
    "index",
    "sample-count",
    "incomplete-sample",
    "crashed-check",
    "image",
    "label",
    "contradicting-label",
    "leaked-image",
    "class-list",
    "fitness",
    "mended-image",
    "duplicate-image",
    "duplicate-key",
    "extra-tar",
    "empty-class",
    "uneven-shards",
    "few-shards",
    "no-digests",
]

MOST_PLACES = 1000  # of one finding that are named; the rest is only counted


class Place(NamedTuple):
    """Where it was found; `key` is "" for a shard as a whole, `shard` is "" for the set as a whole."""

    shard: str
    key: str
    detail: str


@dataclass(frozen=True)
class Finding:
    """One kind of thing that is noteworthy in one split (or across splits, split "").

    Attributes:
        severity: see the module.
        kind: a name that stays.
        split: "train", "val", ...
        count: how often it was found.
        message: what it is, with the count: "3 images cannot be read".
        remedy: what to do.
        places: where, at most `MOST_PLACES` of them.
    """

    severity: Severity
    kind: Kind
    split: str
    count: int
    message: str
    remedy: str
    places: tuple[Place, ...] = ()


class _Text(NamedTuple):
    severity: Severity
    one: str
    many: str  # with {n}
    remedy: str


_COPY = "copy it again from where it came from, or pack the set again"
_TEXTS: dict[Kind, _Text] = {
    "unusable-set": _Text(
        "problem", "the set cannot be opened", "", "bring back what the sentence names, or pack the set again"
    ),
    "damage": _Text("problem", "the set is damaged", "the set is damaged in {n} places", _COPY),
    "missing-shard": _Text(
        "problem",
        "a shard of the manifest is not there",
        "{n} shards of the manifest are not there",
        "copy what is missing into the folder (the manifest names it), or pack the set again",
    ),
    "unreachable-shard": _Text(
        "problem",
        "a shard could not be fetched",
        "{n} shards could not be fetched",
        "look at the reason, mend the network, the rights or the location, and check again",
    ),
    "damaged-shard": _Text(
        "problem",
        "a shard is damaged",
        "{n} shards are damaged",
        f"{_COPY}; to train on what is left, leave them where they are: samples that are lost are substituted, as "
        "long as data.max_corrupt_share allows it",
    ),
    "digest": _Text(
        "problem",
        "a shard is not the one that was packed (SHA-256)",
        "{n} shards are not those that were packed (SHA-256)",
        f"bits were flipped, or somebody changed it: {_COPY}",
    ),
    "index": _Text(
        "problem",
        "an index is not that of its tar",
        "{n} indexes are not those of their tars",
        "delete the .idx files named here: they are built anew from the tars",
    ),
    "sample-count": _Text(
        "problem",
        "a shard holds another number of samples than stated",
        "{n} shards hold other numbers of samples than stated",
        "the tar or the manifest was exchanged: pack the set again, or bring back both from one copy",
    ),
    "incomplete-sample": _Text(
        "problem",
        "a sample has not exactly one image and one label",
        "{n} samples have not exactly one image and one label",
        "give each sample one image and one label with the same name up to the first dot, next to each other in the "
        "tar; if the labels are somewhere else, say so with --label txt or --label json:KEY",
    ),
    "crashed-check": _Text(
        "problem",
        "a shard made the checking process die",
        "{n} shards made the checking process die",
        "an image in it crashes the decoder or needs more memory than there is: check it again without --decode, and "
        "keep it away from training",
    ),
    "image": _Text(
        "problem",
        "an image cannot be read",
        "{n} images cannot be read",
        "mend or drop them at the source and pack again; training substitutes others as long as "
        "data.max_corrupt_share allows it",
    ),
    "label": _Text(
        "problem",
        "a label cannot be used",
        "{n} labels cannot be used",
        "correct them at the source and pack again; for tars of other tools, --label, --classes and --multi-label say "
        "where labels stand and what they are called",
    ),
    "contradicting-label": _Text(
        "problem",
        "an image occurs with different labels",
        "{n} images occur with different labels",
        "the same bytes cannot be both: keep the copy with the right label, drop the others, pack again",
    ),
    "leaked-image": _Text(
        "problem",
        "an image of one split is also in another",
        "{n} images of one split are also in another",
        "results on them measure memory: remove them from the training set, or hold out others, and pack again",
    ),
    "class-list": _Text(
        "problem",
        "the splits do not have the same list of classes",
        "",
        "class numbers mean different things in them: pack them from one source with the same classes",
    ),
    "fitness": _Text("problem", "", "", ""),
    "mended-image": _Text(
        "warning",
        "an image is damaged, and decoders go on with a guess",
        "{n} images are damaged, and decoders go on with a guess",
        "look at them: part may be grey or smeared; replace them at the source if you can",
    ),
    "duplicate-image": _Text(
        "warning",
        "an image occurs more than once",
        "{n} images occur more than once",
        "they are trained on more often than others, and may end up on both sides of a held-out split: drop the copies "
        "at the source if that is not meant",
    ),
    "duplicate-key": _Text(
        "warning",
        "a key occurs more than once",
        "{n} keys occur more than once",
        "shardvit does not mind; tools that know samples by their keys (lists of faults, feature stores) mix them up: "
        "give each sample a name of its own",
    ),
    "extra-tar": _Text(
        "warning",
        "a tar lies in the folder that the manifest does not name",
        "{n} tars lie in the folder that the manifest does not name",
        "shardvit ignores them, other tools that read *.tar do not: move them away, or pack the set again with their "
        "images",
    ),
    "empty-class": _Text(
        "warning",
        "a class has no sample",
        "{n} classes have no sample",
        "check that nothing was forgotten; if they are not wanted, pack again without them",
    ),
    "uneven-shards": _Text(
        "warning",
        "the shards are of very different sizes",
        "",
        "shardvit trains on them exactly all the same, but loads and caches unevenly; tools that give whole shards to "
        "workers wait for the largest: pack the set again",
    ),
    "few-shards": _Text("warning", "", "", ""),
    "no-digests": _Text(
        "info",
        "no digests are known for a shard, so flipped bits are found only where they spoil an image or a header",
        "no digests are known for {n} shards, so flipped bits are found only where they spoil an image or a header",
        "",
    ),
}


def finding(
    kind: Kind,
    *,
    split: str,
    count: int,
    places: Sequence[Place] = (),
    message: str = "",
    remedy: str = "",
    severity: Severity | None = None,
) -> Finding:
    """A finding with its kind's own words; `message` and `remedy` are used in their place, if given."""
    text = _TEXTS[kind]
    return Finding(
        severity=severity or text.severity,
        kind=kind,
        split=split,
        count=count,
        message=message or (text.one if count == 1 or not text.many else text.many.format(n=f"{count:,}")),
        remedy=remedy or text.remedy,
        places=tuple(places[:MOST_PLACES]),
    )
