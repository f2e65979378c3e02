"""Features: those of a direct forward pass, each sample once, whatever the batches and workers, and computed once."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import read_image
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.model.vocabulary import HeadKind
from shardvit.pipeline.recipe.vocabulary import FeatureLayer
from shardvit.pipeline.transfer import features as features_file
from shardvit.pipeline.transfer.features import Features, FeatureStore, choose_images, choose_shots, held_out_rows
from shardvit.pipeline.using.predict import Predictor
from tests.pipeline.transfer.small_model import (
    SIZE,
    damage,
    digits,
    open_small,
    pack_digits,
    save_small,
    store_for,
    trunk_output,
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("features")
    pack_digits(root / "shards")
    for head in ("linear", "mlp"):
        save_small(root / head, head=head)
    return root


@pytest.fixture
def shards(work: Path) -> ShardSet:
    return digits(work / "shards", "val")


def images_of(shards: ShardSet) -> tuple[torch.Tensor, list[int]]:
    """Read, decoded and normalised one by one."""
    reader, rows, labels = ShardReader(shards), [], []
    for shard, size in enumerate(shards.shard_sizes):
        for row in range(size):
            raw = reader.read(shard, row=row)
            rows.append(EvalTransform(SIZE)(read_image(raw.image)))
            labels.append(raw.labels[0])
    pixels = torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).float()
    return (pixels - 127.5) / 127.5, labels


@pytest.mark.parametrize(("head", "layer"), [("linear", "pre_logits"), ("mlp", "pre_logits"), ("mlp", "pooled")])
def test_features_are_those_before_the_head(
    work: Path, shards: ShardSet, tmp_path: Path, head: HeadKind, layer: FeatureLayer
) -> None:
    predictor = open_small(work / head)
    found = store_for(predictor, tmp_path, layer=layer).features(shards)
    images, labels = images_of(shards)
    expected = trunk_output(predictor, images)
    if (head, layer) == ("mlp", "pre_logits"):
        state = predictor.logits.state_dict()  # pyright: ignore[reportFunctionMemberAccess]
        hidden = torch.nn.functional.linear(expected, state["head.pre_logits.weight"], state["head.pre_logits.bias"])
        expected = hidden.tanh()
    torch.testing.assert_close(found.values, expected, atol=1e-5, rtol=1e-4)
    assert found.labels.tolist() == labels and found.samples.tolist() == list(range(shards.num_samples))


def test_batches_and_workers_change_nothing(work: Path, shards: ShardSet, tmp_path: Path) -> None:
    predictor = open_small(work / "linear")
    same = [
        store_for(predictor, tmp_path / str(workers), workers=workers).features(shards).values for workers in (0, 1, 3)
    ]
    assert all((each == same[0]).all() for each in same)
    for size in (1, 7, 1000):
        other = store_for(predictor, tmp_path / f"of{size}", batch_images=size).features(shards)
        torch.testing.assert_close(other.values, same[0], atol=1e-5, rtol=1e-4)
        assert other.samples.tolist() == list(range(shards.num_samples))


def test_what_is_there_is_not_computed_again(
    work: Path, shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_file, "_PART_SAMPLES", 25)
    predictor = open_small(work / "linear")
    store = store_for(predictor, tmp_path, batch_images=5)
    few = store.features(shards, samples=np.array([40, 3, 3, 8]))
    assert store.forward_passes == 1 and few.samples.tolist() == [3, 8, 40]
    every = store.features(shards)
    passes = store.forward_passes
    assert passes == 1 + sum(
        -(-min(25, shards.num_samples - 3 - start) // 5) for start in range(0, shards.num_samples - 3, 25)
    )
    again = store_for(open_small(work / "linear"), tmp_path)
    found = again.features(shards)
    assert again.forward_passes == 0 and (found.values == every.values).all() and (found.labels == every.labels).all()
    assert (again.features(shards, samples=few.samples).values == few.values).all() and again.forward_passes == 0
    for other in (
        store_for(open_small(save_small(tmp_path / "other", seed=1)), tmp_path),
        store_for(open_small(work / "mlp"), tmp_path, layer="pooled"),
    ):
        other.features(shards, samples=few.samples)
        assert other.forward_passes == 1, "another model's or layer's features were taken"


def test_an_interrupted_computation_goes_on(
    work: Path, shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_file, "_PART_SAMPLES", 20)
    expected = store_for(open_small(work / "linear"), tmp_path / "whole").features(shards)
    store = store_for(open_small(work / "linear"), tmp_path)
    write, parts = features_file._write, []

    def interrupted(file: Path, part: Features) -> None:
        parts.append(part)
        if len(parts) == 3:
            raise KeyboardInterrupt
        write(file, part)

    with monkeypatch.context() as patch:
        patch.setattr(features_file, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.features(shards)
    again = store_for(open_small(work / "linear"), tmp_path)
    assert (again.features(shards).values == expected.values).all()
    assert again.forward_passes == sum(-(-min(20, left) // 16) for left in range(shards.num_samples - 40, 0, -20))
    # a part that is damaged is computed again, and no other
    part = next(iter(sorted(tmp_path.glob("*/*.npz"))))
    samples = len(np.load(part)["samples"])
    part.write_bytes(part.read_bytes()[:100])
    mended = store_for(open_small(work / "linear"), tmp_path)
    assert (mended.features(shards).values == expected.values).all() and mended.forward_passes == -(-samples // 16)


def test_damaged_images_are_left_out_and_come_back(work: Path, tmp_path: Path) -> None:
    pack_digits(tmp_path / "shards")
    shards = digits(tmp_path / "shards", "val")
    whole = store_for(open_small(work / "linear"), tmp_path / "whole").features(shards)
    before = damage(shards, 11)
    store = store_for(open_small(work / "linear"), tmp_path / "features")
    found = store.features(shards)
    rest = np.delete(np.arange(shards.num_samples), 11)
    assert found.damaged.tolist() == [11] and found.samples.tolist() == rest.tolist()
    assert (found.values == whole.values[torch.from_numpy(rest)]).all() or torch.allclose(
        found.values, whole.values[torch.from_numpy(rest)], atol=1e-5
    )
    (fault,) = found.faults
    assert fault.shard and fault.reason
    Path(shards.shards[0].url).write_bytes(before)
    assert store.features(shards).samples.tolist() == list(range(shards.num_samples))
    for sample in range(shards.num_samples):
        damage(shards, sample)
    with pytest.raises(UserError, match="none of"):
        store_for(open_small(work / "mlp"), tmp_path / "features").features(shards)


def test_weights_that_are_damaged_are_told(work: Path, shards: ShardSet, tmp_path: Path) -> None:
    predictor = open_small(work / "linear")
    with torch.no_grad():
        predictor.logits.get_parameter("norm.weight")[0] = torch.nan  # pyright: ignore[reportFunctionMemberAccess]
    with pytest.raises(UserError, match="not finite"):
        store_for(predictor, tmp_path).features(shards)


def test_an_onnx_file_cannot_be_seen_into(work: Path) -> None:
    predictor = open_small(work / "linear")
    closed = Predictor(predictor.meta, lambda images: images, device=predictor.device, origin="x.onnx")
    with pytest.raises(UserError, match=r"x\.onnx"):
        FeatureStore(closed)


def test_the_longest_unused_features_go_first(
    work: Path, shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = open_small(work / "linear")
    monkeypatch.setattr(features_file, "_MOST_BYTES", 10**9)
    old, older, not_ours = (tmp_path / name for name in ("a" * 32, "b" * 32, "photographs"))
    for age, folder in enumerate((old, older, not_ours)):
        folder.mkdir()
        (folder / "x.npz").write_bytes(bytes(1000))
        os.utime(folder, (1e9 - age, 1e9 - age))
    store_for(predictor, tmp_path).features(shards, samples=np.arange(3))
    assert older.exists()
    monkeypatch.setattr(
        features_file, "_MOST_BYTES", sum(file.stat().st_size for file in tmp_path.glob("*/*.npz")) - 100
    )
    store_for(predictor, tmp_path).features(shards, samples=np.arange(3, 5))
    assert old.exists() and not older.exists() and (not_ours / "x.npz").exists()


LABELS = np.random.default_rng(0).integers(0, 6, 400)


def test_each_class_has_its_shots_and_fewer_are_among_more() -> None:
    ten = choose_shots(LABELS, shots=10, seed=0)
    assert np.bincount(LABELS[ten]).tolist() == [10] * 6 and len(set(ten.tolist())) == 60
    assert (np.sort(LABELS[ten]) == LABELS[ten]).all()
    five = choose_shots(LABELS, shots=5, seed=0)
    assert five.reshape(6, 5).tolist() == ten.reshape(6, 10)[:, :5].tolist()
    assert set(ten.tolist()) != set(choose_shots(LABELS, shots=10, seed=1).tolist())


def test_a_class_with_too_few_gives_all_that_it_has() -> None:
    taken = choose_shots(LABELS, shots=1000, seed=3)
    assert sorted(taken.tolist()) == list(range(400))


def test_a_damaged_image_is_replaced_by_the_next_of_its_class_and_nothing_else_changes() -> None:
    ten = choose_shots(LABELS, shots=10, seed=0).reshape(6, 10)
    labels = LABELS.copy()
    labels[ten[2, 3]] = -1
    nine = choose_shots(labels, shots=9, seed=0).reshape(6, 9)
    for label in range(6):
        expected = np.delete(ten[label], 3) if label == 2 else ten[label, :9]
        assert nine[label].tolist() == expected.tolist()


def test_other_classes_do_not_change_the_shots_of_one() -> None:
    ten = choose_shots(LABELS, shots=10, seed=0).reshape(6, 10)
    others = np.where(LABELS == 4, 0, -1)
    assert choose_shots(others, shots=10, seed=0).tolist() == ten[4].tolist()


@pytest.mark.parametrize(("n", "most"), [(400, 100), (5, 5), (5, 9)])
def test_images_are_drawn_once_each(n: int, most: int) -> None:
    chosen = choose_images(n, most=most)
    assert len(set(chosen.tolist())) == min(n, most) and (np.sort(chosen) == chosen).all()
    assert set(choose_images(n, most=max(1, most - 1)).tolist()) <= set(chosen.tolist())


@pytest.mark.parametrize(("n", "share", "count"), [(100, 0.2, 20), (2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 2)])
def test_held_out_rows_are_a_share_of_the_samples(n: int, share: float, count: int) -> None:
    samples = np.arange(n) * 7
    chosen = held_out_rows(samples, share=share)
    assert int(chosen.sum()) == count
    turned = held_out_rows(samples[::-1].copy(), share=share)
    assert (turned[::-1] == chosen).all()
