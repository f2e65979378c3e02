"""Figures of a set: the numbers that they show are the glance's, and names are text."""

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from shardvit.data_shards.reading.overview import DrawnImage, Overview
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.shard_set import ShardEntry, ShardSet, ShardTable
from shardvit.pipeline.pictures.set_figures import contact_sheet, image_sizes, label_histogram
from shardvit.pipeline.pictures.style import rendered

HOSTILE = ("<script>alert(1)</script>", "$x^2$", "a\x1b[2J\nb")


def seen(counts: list[int], *, names: tuple[str, ...] = (), sizes: Any = (), **more: Any) -> Overview:
    classes = names + tuple(f"class {number}" for number in range(len(names), len(counts)))
    shards = ShardSet("set", "somewhere", "train", classes, ShardTable.of_entries(()), "digest")
    draw = np.random.default_rng(0)
    drawn = tuple(
        DrawnImage("k", 0, 0, (number % len(counts),), draw.integers(0, 255, (9, 7, 3), dtype=np.uint8), 9, 7)
        for number in range(5)
    )
    return Overview(
        **{
            "shards": shards,
            "seed": 3,
            "images_of_class": np.array(counts, np.int64),
            "labelled": sum(counts),
            "without_label": 0,
            "opened": 0,
            "sizes": np.array(sizes, np.int64).reshape(-1, 3),
            "images": drawn,
            "damaged": (),
            "bytes_read": 0,
            **more,
        }
    )


def texts(made: Any) -> list[str]:
    assert made is not None
    svg = ElementTree.fromstring(rendered(made[1])[1])
    return [each.text or "" for each in svg.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("classes", [3, 40, 41, 500])
def test_the_counts_stand_beside_the_names_the_largest_first(classes: int) -> None:
    counts = np.random.default_rng(1).permutation(classes * 3)[:classes].tolist()
    counts[1] = 0
    words = texts(label_histogram(seen(counts)))
    order = sorted(range(classes), key=lambda number: (-counts[number], number))
    shown = order if classes <= 40 else [*order[:6], *order[-6:]]
    named = [word for word in words if word.startswith("class ")]
    assert named == [f"class {number}" for number in shown]
    for number in shown:
        assert f"{counts[number]:,}" in words


def test_a_few_classes_far_above_the_rest_leave_the_rest_readable() -> None:
    made = label_histogram(seen([100_000, *[3] * 60]))
    assert made is not None and made[1].axes[0].get_yscale() == "symlog"
    words = texts(made)
    assert "100,000" in words and not [word for word in words if "mathdefault" in word]


@pytest.mark.parametrize("counts", [[2, 1, 0], [2] * 60])
def test_names_are_text(counts: list[int]) -> None:
    for made in (contact_sheet(seen(counts, names=HOSTILE)), label_histogram(seen(counts, names=HOSTILE))):
        words = texts(made)
        assert HOSTILE[1] in words and "a\\x1b[2J\\nb" in words
        assert b"<script" not in rendered(made[1])[1]


def test_sizes_of_all_kinds_have_figures_with_plain_numbers() -> None:
    draw = np.random.default_rng(2)
    some = {
        "alike": [(32, 32, 900 + number) for number in range(9)],
        "one": [(7, 9, 100)],
        "wide": np.stack([draw.integers(20, 9000, 99), draw.integers(20, 9000, 99), draw.integers(9, 10**7, 99)], 1),
        "narrow": [(30 + number % 3, 40, 5000) for number in range(30)],
    }
    for name, sizes in some.items():
        made = image_sizes(seen([100], sizes=sizes), image_size=35)
        words = texts(made)
        assert not [word for word in words if "mathdefault" in word or "$" in word], name
        short = np.minimum(np.array(sizes)[:, 0], np.array(sizes)[:, 1])
        below = (short < 35).mean()
        assert (f"{100 * below:.0f} % of them is below the 35 px" in made[0].caption) == (below > 0)


def test_a_part_is_told_from_the_whole() -> None:
    whole = seen([5, 5])
    entry = ShardEntry("/x.tar", "x.tar", 5, 100, "", index=None, labels=LabelSpec())
    part = replace(whole, shards=replace(whole.shards, shards=ShardTable.of_entries([entry] * 7)), opened=2)
    captions = [made[0].caption for each in (whole, part) if (made := label_histogram(each))]
    assert "all 10 images" in captions[0]
    assert "10 images in 2 of 7 shards" in captions[1] and "seed 3" in captions[1]


def test_nothing_seen_is_no_figure() -> None:
    nothing = seen([0, 0], images=())
    assert contact_sheet(nothing) is None
    assert label_histogram(nothing) is None
    assert image_sizes(nothing) is None
