"""A set in two parts: each sample in exactly one, the share exact, the same everywhere, for any shards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.holdout import held_out_images, rows_of, shared_images, take_portion
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.shard_set import (
    Portion,
    ShardEntry,
    ShardSet,
    ShardsSpec,
    ShardTable,
    merge_shard_sets,
)
from tests.data_shards.external_tars import png, write_tar

law = settings(max_examples=25, deadline=None)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(lambda sizes: sum(sizes) >= 2)
SHARES = st.floats(1e-4, 1 - 1e-4)


def shard_set(sizes: Sequence[int]) -> ShardSet:
    entries = (ShardEntry(f"/{n}.tar", f"{n}.tar", size, 1, "", None, LabelSpec()) for n, size in enumerate(sizes))
    return ShardSet(
        "set", source="set", split="train", classes=("a", "b"), shards=ShardTable.of_entries(tuple(entries)), digest="d"
    )


def parts(shards: ShardSet, share: float) -> tuple[ShardSet, ShardSet]:
    return take_portion(shards, Portion("held_out", share)), take_portion(shards, Portion("rest", share))


def stored_rows(shards: ShardSet) -> list[tuple[int, int]]:
    """(shard, row in its tar) of each sample."""
    subsets = [(number, entry.subset) for number, entry in enumerate(shards.shards)]
    return [(number, row) for number, subset in subsets if subset is not None for row in rows_of(subset).tolist()]


# ---- the cut


@law
@given(SIZES, SHARES)
def test_each_sample_is_in_exactly_one_part(sizes: list[int], share: float):
    held_out, rest = parts(shard_set(sizes), share)
    everything = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    assert sorted(stored_rows(held_out) + stored_rows(rest)) == everything
    for one in (held_out, rest):
        assert list(one.shard_sizes) == [
            sum(shard == number for shard, _ in stored_rows(one)) for number in range(len(sizes))
        ]


@law
@given(SIZES, SHARES)
def test_the_share_is_exact_over_the_set_and_rounded_in_each_shard(sizes: list[int], share: float):
    held_out, rest = parts(shard_set(sizes), share)
    total = held_out_images(sum(sizes), share=share)
    assert held_out.num_samples == total and rest.num_samples == sum(sizes) - total
    assert 1 <= total < sum(sizes) and (abs(total - share * sum(sizes)) <= 0.5 or total in (1, sum(sizes) - 1))
    for size, count in zip(sizes, held_out.shard_sizes, strict=True):
        assert abs(count - total * size / sum(sizes)) < 1


@pytest.mark.parametrize(("sizes", "share", "count"), [([1] * 500, 0.01, 5), ([7] * 100, 0.1, 70), ([2], 0.01, 1)])
def test_the_papers_shares_of_small_sets(sizes: list[int], share: float, count: int):
    assert parts(shard_set(sizes), share)[0].num_samples == count


@law
@given(SIZES, SHARES, SHARES, st.sampled_from([("held_out", "held_out"), ("held_out", "rest"), ("rest", "rest")]))
def test_images_that_two_parts_share_are_counted(sizes: list[int], share: float, other_share: float, which: Any):
    whole = shard_set(sizes)
    one, other = (
        take_portion(whole, Portion(part, each)) for part, each in zip(which, (share, other_share), strict=True)
    )
    expected = len({*stored_rows(one)} & {*stored_rows(other)})
    assert shared_images(one, other) == shared_images(other, one) == expected
    assert shared_images(one, whole) == one.num_samples and shared_images(whole, whole) == sum(sizes)


def test_shards_are_known_by_their_place_or_their_bytes():
    def entry(name: str, *, sha256: str = "") -> ShardEntry:
        return ShardEntry(name, name, 5, 1, sha256, None, LabelSpec())

    def shards(*entries: ShardEntry) -> ShardSet:
        return replace(shard_set([1]), shards=ShardTable.of_entries(entries))

    a, b = entry("/a.tar", sha256="1"), entry("/b.tar")
    assert shared_images(shards(entry("/x/copy.tar", sha256="1")), shards(b, a)) == 5
    assert shared_images(shards(entry("/b.tar", sha256="2")), shards(a, b, b)) == 5
    assert shared_images(shards(entry("/c.tar"), entry("/d.tar", sha256="9")), shards(a, b)) == 0


def test_ten_to_the_nine_samples_are_counted_exactly():
    sizes = [9_999 + number % 3 for number in range(100_000)]
    held_out, rest = parts(shard_set(sizes), 0.01)
    assert held_out.num_samples == round(0.01 * sum(sizes)) == sum(sizes) - rest.num_samples
    assert set(held_out.shard_sizes) <= {99, 100, 101}


@pytest.mark.parametrize("sizes", [[1], [0, 1, 0]])
def test_nothing_is_left_of_one_image(sizes: list[int]):
    with pytest.raises(UserError, match="1 images"):
        take_portion(shard_set(sizes), Portion("rest", 0.5))


def test_every_sample_has_the_same_chance_and_classes_do_not_matter():
    """Shards of 1 to 9 images: the held-out share by size of the shard, and by place in it, is the set's."""
    sizes = [1 + number % 9 for number in range(900)]
    held_out, _ = parts(shard_set(sizes), 0.2)
    by_size, by_row = np.zeros(10), np.zeros(9)
    for shard, row in stored_rows(held_out):
        by_size[sizes[shard]] += 1
        by_row[row] += sizes[shard] == 9
    images_by_size = np.array([100 * size for size in range(1, 10)])
    assert stats.chisquare(by_size[1:], images_by_size / images_by_size.sum() * by_size.sum()).pvalue > 1e-3
    assert stats.chisquare(by_row).pvalue > 1e-3
    single = np.array(parts(shard_set([1] * 50_000), 0.01)[0].shard_sizes)
    of_period = single.reshape(-1, 50).sum(axis=0)
    assert of_period.sum() == 500 and stats.chisquare(of_period).pvalue > 1e-3, (
        "one image a shard, classes taking turns"
    )


def test_the_held_out_samples_are_pinned():
    """A run that continues after a change would evaluate what it trained on."""
    assert stored_rows(parts(shard_set([5, 1, 30, 2]), 0.3)[0]) == GOLDEN


GOLDEN = [(0, 3), (0, 4), (1, 0), (2, 2), (2, 7), (2, 11), (2, 14), (2, 15), (2, 18), (2, 27), (2, 28)]


def test_parts_and_shares_have_digests_of_their_own():
    shards = shard_set([50, 50])
    digests = [shards.digest, *(one.digest for share in (0.1, 0.11) for one in parts(shards, share))]
    assert len(set(digests)) == 5


def test_known_losses_are_shared_out():
    shards = replace(shard_set([100, 100]), lost_samples=10)
    held_out, rest = parts(shards, 0.1)
    assert (held_out.lost_samples, rest.lost_samples) == (1, 9)


# ---- read from tars


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tars of other tools: the red of each image's one colour is its number, its class that number mod 3."""
    folder, number = tmp_path_factory.mktemp("parts"), 0
    for tar, count in enumerate((9, 1, 14, 6)):
        members: list[tuple[str, bytes]] = []
        for row in range(count):
            image = png(np.full((4, 5, 3), (number, 0, 0), dtype=np.uint8))
            members += [(f"t{tar}r{row}.png", image), (f"t{tar}r{row}.cls", b"%d" % (number % 3))]
            number += 1
        write_tar(folder / f"{tar}.tar", members)
    return folder


def opened(folder: Path, portion: Portion | None, **options: str) -> ShardSet:
    spec = ShardsSpec(str(folder), portion=portion)
    return open_shards(spec, index_folder=folder / "indexes", report=lambda _: None, **options)  # pyright: ignore[reportArgumentType]


def test_the_reader_gives_the_parts_samples_and_no_other(folder: Path):
    keys: dict[str, list[str]] = {}
    for name, portion in (("all", None), ("held_out", Portion("held_out", 0.3)), ("rest", Portion("rest", 0.3))):
        shards = opened(folder, portion)
        reader = ShardReader(shards)
        keys[name] = [reader.read(n, row=row).key for n, size in enumerate(shards.shard_sizes) for row in range(size)]
        for n, size in enumerate(shards.shard_sizes):
            for row in range(size):
                shard, stored = reader.read(n, row=row).key[1:].split("r")
                assert int(shard) == n and (portion is None or int(stored) in rows_of(shards.shards[n].subset))  # pyright: ignore[reportArgumentType]
    assert len(keys["held_out"]) == 9
    assert sorted(keys["held_out"] + keys["rest"]) == sorted(keys["all"])


def test_a_damaged_tar_keeps_its_samples_in_their_parts(folder: Path, tmp_path: Path):
    """Lost and remaining samples of a cut tar stay in their parts."""
    from shardvit.data_shards.errors import CorruptSample
    from shardvit.data_shards.shards.tar_index import build_index, index_path, write_index

    whole = folder / "2.tar"
    index = build_index(whole)
    cut = tmp_path / "cut.tar"
    write_index(index, index_path(cut))
    cut.write_bytes(whole.read_bytes()[: int(index.image_offset[10])])
    entry = ShardEntry(str(cut), cut.name, 14, whole.stat().st_size, "", None, LabelSpec(), state="damaged")
    shards = ShardSet(
        "cut", source="cut", split="train", classes=("0", "1", "2"), shards=ShardTable.of_entries([entry]), digest="d"
    )
    read: list[int] = []
    for one in parts(shards, 0.4):
        reader = ShardReader(one)
        for row, (_, stored) in enumerate(stored_rows(one)):
            if stored < 10:
                assert reader.read(0, row=row).key == f"t2r{stored}"
                read.append(stored)
            else:
                with pytest.raises(CorruptSample):
                    reader.read(0, row=row)
    assert sorted(read) == list(range(10))


def test_parts_of_several_sets_are_mixed_as_sets_are():
    one, other = (take_portion(shard_set(sizes), Portion("rest", 0.5)) for sizes in ([4, 4], [6]))
    merged = merge_shard_sets([one, other])
    assert merged.num_samples == 7 and [entry.subset.number for entry in merged.shards if entry.subset] == [0, 1, 0]
