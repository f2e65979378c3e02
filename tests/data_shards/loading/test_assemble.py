"""Damaged samples, several labels and mixed images are the same on any number of processes."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.data_shards.errors import SampleError
from shardvit.data_shards.images.decode import PixelLimit
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading import assemble
from shardvit.data_shards.loading.assemble import PADDING, Access
from shardvit.data_shards.loading.batch import Batch, Fault
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.shard_set import ShardSet, ShardsSpec
from shardvit.data_shards.shards.tar_index import open_index, read_index
from shardvit.data_shards.vocabulary import WorkerKind
from shardvit.pipeline.stage.pixels import targets
from tests.data_shards.external_tars import png, read_all, write_tar
from tests.data_shards.images.pictures import photograph
from tests.data_shards.streams import (
    GLOBAL_BATCH,
    SIZE,
    STEPS,
    global_batches,
    make_order,
    micro_batches,
    pack_noise,
    seen,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def spoil(shards: ShardSet, *, shard: int, row: int) -> str:
    """Overwrite one image with zeros; its key."""
    path = Path(shards.shards[shard].url)
    index = open_index(path)
    with open(path, "r+b") as stream:
        stream.seek(int(index.image_offset[row]))
        stream.write(b"\x00" * int(index.image_size[row]))
    return index.keys[row]


@pytest.fixture
def spoiled(tmp_path: Path) -> tuple[ShardSet, set[str]]:
    """61 images, three of them spoiled after packing, and their keys."""
    shards = pack_noise(tmp_path, count=61, samples_per_shard=9)
    return shards, {spoil(shards, shard=shard, row=row) for shard, row in ((0, 0), (2, 3), (6, 1))}


@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (1, "process"), (2, "thread")])
def test_where_none_is_allowed_the_first_damaged_sample_is_named(
    spoiled: tuple[ShardSet, set[str]], workers: int, kind: WorkerKind
):
    shards, keys = spoiled
    with pytest.raises(SampleError) as caught:
        list(micro_batches(shards, workers=workers, kind=kind, stop_step=8))  # 61 samples are 7.6 batches
    message = str(caught.value)
    assert any(repr(key) in message for key in keys) and ".tar" in message and "max_corrupt_share" in message
    assert "\n" not in message and "Traceback" not in message
    dataset = EvalBatches(Access(shards), transform=EvalTransform(SIZE), rank=0, world_size=1, batch_size=4)
    with pytest.raises(SampleError, match="|".join(keys)):
        list(eval_batches(dataset, workers=workers, kind=kind))


def test_all_but_the_damaged_places_are_as_if_nothing_were_damaged(tmp_path: Path):
    whole = global_batches(pack_noise(tmp_path, count=61, samples_per_shard=9), world_size=1)
    shards = open_shards(str(tmp_path / "out" / "train"))
    key = spoil(shards, shard=2, row=3)
    order, places = make_order(shards), 0
    for step, batch in enumerate(micro_batches(shards, on_corrupt="substitute")):
        wanted = order.rank_batch(step, rank=0, world_size=1).sample
        for slot, before in enumerate(whole[step]):
            damaged = before.key == key
            assert bool(batch.substituted[slot]) == damaged == (batch.keys[slot] != before.key)
            assert (int(batch.samples[slot]) == wanted[slot]) == (not damaged)
            assert damaged or batch.images[slot].numpy().tobytes() == before.pixels
            # The crop and the flip are the place's own.
            assert bool(batch.mirrored[slot]) == before.mirrored
            places += damaged
        expected = [key] * sum(before.key == key for before in whole[step])
        assert [fault.key for fault in batch.faults] == expected
    assert places in (6, 7)  # once in each of 6.6 epochs


def test_the_offenders_of_an_epoch_are_exactly_the_damaged_ones(spoiled: tuple[ShardSet, set[str]]):
    shards, keys = spoiled
    faults = [fault for batch in micro_batches(shards, on_corrupt="substitute", stop_step=8) for fault in batch.faults]
    assert {fault.key for fault in faults} == keys
    names = {entry.name for entry in shards.shards}
    assert all(isinstance(fault, Fault) and fault.reason and fault.shard in names for fault in faults)


def test_a_tar_cut_short_loses_what_is_cut_and_nothing_else(tmp_path: Path):
    pack_noise(tmp_path, count=61, samples_per_shard=9)
    folder = tmp_path / "out" / "train"
    path = Path(open_shards(str(folder)).shards[3].url)
    index = open_index(path)
    with open(path, "r+b") as stream:
        stream.truncate(int(index.image_offset[5]) + 10)
    shards = open_shards(str(folder), damaged="report")
    assert len(shards.damage) == 1 and path.name in shards.damage[0]
    batches = list(micro_batches(shards, on_corrupt="substitute", stop_step=8))
    offenders = {(fault.shard, fault.key) for batch in batches for fault in batch.faults}
    assert offenders == {(shards.shards[3].name, key) for key in list(index.keys)[5:]}
    seen_keys = {key for batch in batches for key in batch.keys}
    every = {key for entry in shards.shards for key in read_index(Path(entry.url).with_suffix(".idx")).keys}
    assert seen_keys == every - set(list(index.keys)[5:])


def test_a_set_without_a_readable_sample_ends_instead_of_searching_for_ever(tmp_path: Path):
    shards = pack_noise(tmp_path, count=20, samples_per_shard=5)
    for shard in range(4):
        for row in range(5):
            spoil(shards, shard=shard, row=row)
    with pytest.raises(SampleError, match="so are the 16 substitutes"):
        next(micro_batches(shards, on_corrupt="substitute"))


def pack_photographs(folder: Path, *, count: int) -> ShardSet:
    """JPEGs large enough for nvImageCodec, and every fifth a PNG."""
    (folder / "in" / "a").mkdir(parents=True)
    for number in range(count):
        image = photograph("china" if number % 2 else "flower", height=120 + number, width=150 + 3 * number)
        image.save(folder / "in" / "a" / f"{number:02d}.{'jpg' if number % 5 else 'png'}")
    pack(str(folder / "in"), folder / "out", samples_per_shard=7, report=lambda line: None)
    return open_shards(str(folder / "out" / "train"))


def test_how_many_are_decoded_together_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither a pixel, nor what is substituted, nor which fault is told first."""
    shards = pack_photographs(tmp_path, count=23)
    lost = [spoil(shards, shard=shard, row=row) for shard, row in ((0, 1), (1, 4), (1, 5), (3, 0))]

    def stream() -> list[Any]:
        batches = list(micro_batches(shards, on_corrupt="substitute", stop_step=9))
        assert {fault.key for batch in batches for fault in batch.faults} == set(lost)
        return [(seen(batch), batch.substituted.tolist(), batch.faults) for batch in batches]

    def first_fault() -> str:
        with pytest.raises(SampleError) as caught:
            list(micro_batches(shards, stop_step=9))
        return str(caught.value)

    together = []
    decode_together = assemble.decode_together
    monkeypatch.setattr(
        assemble, "decode_together", lambda parts: together.append(len(parts)) or decode_together(parts)
    )
    expected = stream(), first_fault()
    assert max(together) > 6
    monkeypatch.setattr(assemble, "TOGETHER", 1)
    together.clear()
    assert (stream(), first_fault()) == expected
    assert max(together) == 1
    monkeypatch.setattr(assemble, "TOGETHER", 16)
    monkeypatch.setattr(assemble, "_MOST_PIXELS_TOGETHER", 40_000)
    together.clear()
    assert (stream(), first_fault()) == expected
    assert 2 <= max(together) < GLOBAL_BATCH


# ---- several labels


def test_lists_of_labels_arrive_padded(tmp_path: Path):
    """A tar as other tools write it, its labels in JSON."""
    labels = [[0], [], [2, 1], [1], [0, 1, 2], [2], [0], [1, 2], [2, 0]]
    (tmp_path / "set").mkdir()
    parts: list[tuple[str, bytes]] = []
    for number, row in enumerate(labels):
        parts.append((f"{number:03d}.png", png(np.full((9, 9, 3), number * 20, dtype=np.uint8))))
        parts.append((f"{number:03d}.json", json.dumps({"tags": row}).encode()))
    write_tar(tmp_path / "set" / "a.tar", parts)
    spec = ShardsSpec(str(tmp_path / "set"), label="json:tags", kind="multi")
    shards = open_shards(spec, index_folder=tmp_path / "indexes")
    assert shards.is_multi_label and shards.num_classes == 3
    for batch in micro_batches(shards, stop_step=STEPS // 10):
        for key, row in zip(batch.keys, batch.labels.tolist(), strict=True):
            assert [label for label in row if label != PADDING] == labels[int(key)]
        hot = targets(batch, device=torch.device("cpu"), num_classes=3, label_kind="multi")
        assert hot.shape == (GLOBAL_BATCH, 3)
        assert [torch.nonzero(row)[:, 0].tolist() for row in hot] == [sorted(labels[int(key)]) for key in batch.keys]


def test_an_image_above_the_limit_is_damaged_and_says_which_key(tmp_path: Path):
    shards = pack_noise(tmp_path, count=12, samples_per_shard=6)
    sizes = {Image.open(io.BytesIO(raw.image)).size for raw in read_all(shards)}
    largest = max(width * height for width, height in sizes)

    def batch(limit: int, **options: Any) -> Batch:
        access = Access(shards, pixel_limit=PixelLimit(limit), **options)
        dataset = EvalBatches(access, transform=EvalTransform(SIZE), rank=0, world_size=1, batch_size=12)
        (only,) = eval_batches(dataset, workers=0)
        return only

    assert batch(largest).faults == ()
    faults = batch(largest - 1, on_corrupt="substitute").faults
    assert faults and all("data.max_image_pixels" in fault.reason for fault in faults)
    with pytest.raises(SampleError, match=r"data\.max_image_pixels"):
        batch(largest - 1)
