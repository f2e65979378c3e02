"""Kinds of findings, with severity and remedy.

A problem is damage, or data that silently make results wrong: exit code 1. A warning does not prevent training. Kind
names appear in `--json`, so they must not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Severity = Literal["problem", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

MOST_PLACES = 1000  # named per finding; the rest is only counted


class FoundAt(NamedTuple):
    """Place of a finding; `key` is "" for a whole shard, `shard` is "" for the whole set."""

    shard: str
    key: str
    detail: str


@dataclass(frozen=True)
class Finding:
    """One kind of finding in one split, or across splits ("train and val")."""

    severity: Severity
    kind: str
    split: str
    count: int
    message: str  # with the count: "3 unreadable images"
    remedy: str
    places: tuple[FoundAt, ...] = ()


_COPY = "copy it again from its origin, or pack the set again"
_SUBSTITUTED = "as long as data.max_corrupt_share allows it"
_SEEN = (
    "results on held-out images that were trained on measure memory: pack the training images again with "
    "--exclude-matches-of, or report how many there are"
)
# Message ({n}: count; {s}, {es}: plural ending) and remedy of each kind.
_KINDS: dict[Severity, dict[str, tuple[str, str]]] = {
    "problem": {
        "unusable-set": ("the set cannot be opened", "restore the file that the sentence names, or pack the set again"),
        "damage": ("the set is damaged in {n} place{s}", _COPY),
        "missing-shard": (
            "{n} shard{s} of the manifest missing",
            "copy the missing files into the folder (the manifest names them), or pack the set again",
        ),
        "unreachable-shard": (
            "{n} shard{s} could not be fetched",
            "fix the network, the permissions or the location (see the reason), and check again",
        ),
        "damaged-shard": (
            "{n} damaged shard{s}",
            f"{_COPY}; to train on what is left, leave it in place: lost samples are substituted {_SUBSTITUTED}",
        ),
        "digest": (
            "{n} shard{s} with another SHA-256 than the manifest states",
            f"bits were flipped, or somebody changed the file: {_COPY}",
        ),
        "index": ("{n} index file{s} not matching the tar", "delete these .idx files: they are rebuilt from the tars"),
        "sample-count": (
            "{n} shard{s} with another number of samples than stated",
            "the tar or the manifest was exchanged: pack the set again, or restore both from one copy",
        ),
        "incomplete-sample": (
            "{n} sample{s} without exactly one image and one label",
            "give each sample one image and one label with the same name up to the first dot, next to each other in "
            "the tar; if the labels are in another member, say so with --label txt or --label json:KEY",
        ),
        "crashed-check": (
            "{n} crash{es} of the checking process",
            "an image in the shard crashes the decoder or needs more memory than there is: check again without "
            "--decode, and do not train on the shard",
        ),
        "image": (
            "{n} unreadable image{s}",
            f"repair or drop them at the source and pack again; training substitutes others {_SUBSTITUTED}",
        ),
        "label": (
            "{n} unusable label{s}",
            "correct them at the source and pack again; for tars of other tools, --label, --classes and --multi-label "
            "say where the labels are and what they are called",
        ),
        "contradicting-label": (
            "{n} image{s} occurring with different labels",
            "keep the copy with the right label, drop the others, and pack again",
        ),
        "leaked-image": (
            "{n} image{s} of one split also in another",
            "held-out results on them measure memory: drop them from training, or hold out others, and pack again",
        ),
        "equal-bytes": ("", _SEEN),
        "equal-pixels": ("", _SEEN),
        "near-duplicate": ("", _SEEN),
        "class-list": (
            "the splits have different lists of classes",
            "class numbers mean different things in them: pack them from one source with the same classes",
        ),
        "fitness": ("", ""),
    },
    "warning": {
        "mended-image": (
            "{n} damaged image{s}, which decoders complete with a guess",
            "look at them: part may be grey or smeared; replace them at the source if you can",
        ),
        "duplicate-image": (
            "{n} image{s} occurring more than once",
            "they are trained on more often, and may end up on both sides of a held-out split: drop the copies at the "
            "source if that is not meant",
        ),
        "duplicate-key": (
            "{n} key{s} occurring more than once",
            "shardvit does not mind, but tools that know samples by key mix them up: give each its own name",
        ),
        "extra-tar": (
            "{n} tar{s} in the folder that the manifest does not name",
            "shardvit ignores them, other tools read every *.tar: move them away, or pack again with their images",
        ),
        "empty-class": (
            "{n} class{es} without samples",
            "check that nothing was forgotten; if they are not wanted, pack again without them",
        ),
        "alike-classes": (
            "classes whose names differ only by case or blanks",
            "if they are one class, give them one name at the source and pack again",
        ),
        "one-class": (
            "all images are of one class",
            "if folders inside its folder were meant as classes, pack from there",
        ),
        "uneven-shards": (
            "",
            "training is exact all the same, but loads and caches unevenly, and tools that give whole shards to "
            "workers wait for the largest: pack the set again",
        ),
        "few-shards": ("", ""),
    },
    "info": {
        "semantic": ("", "look at the pairs (--output shows them); leave out those of semantic.jsonl if you wish"),
        "unsure": ("", "look at the pairs (--output shows them); they do not count as the same"),
        "not-compared": ("", ""),
        "no-digests": (
            "{n} shard{s} without a digest: flipped bits are found only where they spoil an image or a header",
            "",
        ),
    },
}


def finding(
    kind: str,
    *,
    split: str,
    count: int = 1,
    places: Sequence[FoundAt] = (),
    message: str = "",
    remedy: str = "",
    severity: Severity | None = None,
) -> Finding:
    """Make a finding in its kind's words; `message`, `remedy` and `severity` override them."""
    usual: Severity = next(each for each in SEVERITIES if kind in _KINDS[each])
    text, usual_remedy = _KINDS[usual][kind]
    plural = {"s": "", "es": ""} if count == 1 else {"s": "s", "es": "es"}
    message = message or text.format(n=f"{count:,}", **plural)
    return Finding(severity or usual, kind, split, count, message, remedy or usual_remedy, tuple(places[:MOST_PLACES]))
