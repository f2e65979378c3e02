"""Scores of a whole measure: equal to scikit-learn on the same features; damage, mistakes and small sets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.pipeline.ranks.start_clock import StartClock
from shardvit.pipeline.transfer.features import FeatureStore, choose_images
from shardvit.pipeline.transfer.measure import measure
from shardvit.pipeline.transfer.settings import FewShotSettings, KnnSettings, ProbeSettings, TransferSet
from tests.pipeline.transfer.small_model import CLASSES, damage, digits, open_small, pack_digits, save_small, store_for


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("measure")
    pack_digits(root / "shards")
    save_small(root / "model")
    return root


@pytest.fixture
def features(work: Path) -> FeatureStore:
    return store_for(open_small(work / "model"), work / "features")


def sets(folder: Path) -> TransferSet:
    return TransferSet("digits", digits(folder, "train"), digits(folder, "val"), group="natural")


def test_few_shot_is_ridge_on_the_shots_that_it_names(features: FeatureStore, work: Path) -> None:
    data = sets(work / "shards")
    measured = measure(features, data, FewShotSettings(shots=(3, 10), seeds=2, l2=(4.0,)), most_images=None)
    train, held_out = features.features(data.train), features.features(data.eval)
    for score in measured.scores:
        shots = int(str(score.settings["shots"]))
        expected = []
        for by_class in measured.shots.values():
            assert {label: len(samples) for label, samples in by_class.items()} == dict.fromkeys(range(CLASSES), 10)
            samples = np.concatenate([taken[:shots] for taken in by_class.values()])
            rows = train.rows_of(samples)
            x, y = train.values[rows].double().numpy(), train.labels[rows].numpy()
            mean, deviation = x.mean(axis=0), x.std(axis=0) + 1e-5

            def prepared(values: np.ndarray, mean: np.ndarray = mean, deviation: np.ndarray = deviation) -> np.ndarray:
                return np.pad((values - mean) / deviation, ((0, 0), (0, 1)), constant_values=100.0)

            ridge = Ridge(alpha=4.0, fit_intercept=False).fit(prepared(x), 2 * np.eye(CLASSES)[y] - 1)
            predicted = ridge.predict(prepared(held_out.values.double().numpy())).argmax(axis=1)
            expected.append(float((predicted == held_out.labels.numpy()).mean()))
        assert score.values == pytest.approx(expected, abs=0) and score.value == pytest.approx(np.mean(expected))
        assert (score.group, score.metric, score.settings["images"]) == ("natural", "top1", shots * CLASSES)
    assert measured.used.eval_images == data.eval.num_samples and measured.used.damaged_images == 0


class Heard(StartClock):
    """What it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, list[str]] = {}

    def set_status(self, part: str, far: str = "") -> None:
        self.parts.setdefault(part.split(" of ")[0], []).append(far)


def test_what_lasts_is_told_with_how_far_it_is(work: Path, tmp_path: Path) -> None:
    heard, data = Heard(), sets(work / "shards")
    fresh = store_for(open_small(work / "model"), tmp_path, clock=heard)
    measure(fresh, data, ProbeSettings(c=(0.1, 1.0)), most_images=None)
    images = [int(far.split()[0]) for far in heard.parts["computing features"]]
    assert images[0] == 0 and max(images) > data.train.num_samples / 2
    fits = heard.parts["fitting"]
    assert {far.split(" on ")[0] for far in fits} == {"C 0.1", "C 1"} and any(", 5 iterations" in far for far in fits)
    measure(fresh, data, KnnSettings(k=(5,)), most_images=None)
    assert heard.parts["finding neighbours"] == [f"0 of {data.eval.num_samples:,} images"]


def test_only_the_shots_are_read_of_the_training_set(work: Path, tmp_path: Path) -> None:
    fresh = store_for(open_small(work / "model"), tmp_path, batch_images=1)
    data = sets(work / "shards")
    measured = measure(fresh, data, FewShotSettings(shots=(5,), seeds=1), most_images=None)
    assert measured.used.train_images == 5 * CLASSES
    assert fresh.forward_passes == 5 * CLASSES + data.eval.num_samples


def test_knn_and_probe_on_so_many_images(features: FeatureStore, work: Path) -> None:
    data = sets(work / "shards")
    train, held_out = features.features(data.train), features.features(data.eval)
    chosen = train.take(choose_images(data.train.num_samples, most=60))
    knn = measure(features, data, KnnSettings(k=(5,)), most_images=60)
    oracle = KNeighborsClassifier(5, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07), algorithm="brute")
    oracle.fit(chosen.values.double().numpy(), chosen.labels.numpy())
    (top1,) = knn.scores
    assert top1.value == oracle.score(held_out.values.double().numpy(), held_out.labels.numpy())
    probe = measure(features, data, ProbeSettings(c=(0.1, 1.0)), most_images=60)
    assert [each.metric for each in probe.scores] == ["top1", "loss"] and probe.used.train_images == 60
    assert probe.scores[0].value > 1.5 / CLASSES


def test_a_damaged_shot_is_replaced_and_counted(work: Path, tmp_path: Path) -> None:
    folder = pack_digits(tmp_path / "shards")
    settings = FewShotSettings(shots=(4,), seeds=1)
    before = measure(store_for(open_small(work / "model"), tmp_path / "a"), sets(folder), settings, most_images=None)
    lost = before.shots[0][2][1]
    damage(digits(folder, "train"), lost)
    damage(digits(folder, "val"), 7)
    after = measure(store_for(open_small(work / "model"), tmp_path / "b"), sets(folder), settings, most_images=None)
    taken = after.shots[0][2]
    assert lost not in taken and len(taken) == 4 and set(before.shots[0][2]) - {lost} < set(taken)
    assert {label: samples for label, samples in after.shots[0].items() if label != 2} == {
        label: samples for label, samples in before.shots[0].items() if label != 2
    }
    assert after.used.damaged_images == 2 and len(after.faults) == 2
    assert after.used.eval_images == before.used.eval_images - 1


def test_a_class_with_few_images_gives_all_and_is_told(features: FeatureStore, work: Path) -> None:
    data = sets(work / "shards")
    measured = measure(features, data, FewShotSettings(shots=(5, 100_000), seeds=1), most_images=None)
    assert measured.scores[1].settings["images"] == data.train.num_samples and len(measured.notes) == 1


def test_sets_that_do_not_fit_are_refused(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack("digits", tmp_path / "other", classes=("5", "6"), holdout=0.3, report=lambda line: None)
    data = sets(work / "shards")
    with pytest.raises(UserError, match=r"the classes of .* differ"):
        replace(data, eval=digits(tmp_path / "other", "val"))
    monkeypatch.setattr(ShardSet, "is_multi_label", property(lambda shards: shards is data.eval))
    with pytest.raises(UserError, match=r"val.* list of labels"):
        replace(data)
