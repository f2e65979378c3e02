"""A stage's shards: packed, foreign and mixed ones opened alike, and refused where they do not fit together."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.order.mixture import MixedOrder
from shardvit.data_shards.order.sample_order import Order
from shardvit.data_shards.packing.pack import pack
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.stage.stage_data import StageData, cache_advice, open_data, training_order
from tests.small_recipe import small_recipe, small_stage


def recipe(train: Any, held_out: Any, *, data: dict[str, Any] | None = None, **stage: Any) -> Recipe:
    keys = {"global_batch_size": 8, **stage, "train": train, "eval": held_out}
    return Recipe.model_validate(small_recipe(data=data or {}, pretrain_=small_stage(**keys)))


def opened(ours: Recipe) -> StageData:
    return open_data(ours, stage="pretrain", report=lambda line: None)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of the same two classes, and one of others."""
    folder = tmp_path_factory.mktemp("digits")
    for name, classes, seed in (("one", ("0", "1"), 0), ("two", ("0", "1"), 1), ("other", ("0", "2"), 0)):
        pack(
            "digits",
            folder / name,
            classes=classes,
            holdout=0.2,
            seed=seed,
            samples_per_shard=50,
            report=lambda line: None,
        )
    return folder


@pytest.fixture
def tagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tars of another tool, with a list of labels in JSON."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "tagged"
    folder.mkdir()
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for sample in range(10):
                stream = io.BytesIO()
                Image.new("RGB", (9, 9), (sample * 20, 0, 0)).save(stream, "PNG")
                labels = {"tags": [["red", "blue"][sample % 2], "all"], "one": sample % 3}
                for name, content in (("png", stream.getvalue()), ("json", json.dumps(labels).encode())):
                    member = tarfile.TarInfo(f"{number}{sample}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return folder


def test_one_packed_set(digits: Path):
    ours = recipe(str(digits / "one/train"), str(digits / "one/val"))
    data = opened(ours)
    assert data.train.classes == ("0", "1") == data.eval.classes and data.weights is None
    plan = plan_stage(ours, stage="pretrain", samples_per_epoch=data.train.num_samples, world_size=2)
    assert isinstance(training_order(ours, data=data, plan=plan), Order)
    assert cache_advice(ours, data=data, plan=plan, processes_per_node=2) is None  # nothing is fetched


def test_what_is_held_out_of_the_training_set_is_evaluated_beside_the_other(digits: Path):
    whole = opened(recipe(str(digits / "one/train"), str(digits / "one/val")))
    data = opened(recipe(str(digits / "one/train"), str(digits / "one/val"), hold_out=0.1))
    minival = data.also_eval["minival"]
    assert minival.num_samples == round(0.1 * whole.train.num_samples) > 0
    assert data.train.num_samples == whole.train.num_samples - minival.num_samples
    assert data.eval == whole.eval and len({data.train.digest, minival.digest, whole.train.digest}) == 3


def test_a_mixture_counts_through_its_sets_and_keeps_the_weights(digits: Path):
    train = [{"shards": str(digits / name / "train"), "weight": weight} for name, weight in (("one", 3), ("two", 1))]
    ours = recipe(train, str(digits / "one/val"))
    data = opened(ours)
    parts = [sum(sizes) for sizes in data.train_sizes]
    assert data.train.num_samples == sum(parts) and data.weights == (3.0, 1.0)
    plan = plan_stage(ours, stage="pretrain", samples_per_epoch=data.train.num_samples, world_size=1)
    order = training_order(ours, data=data, plan=plan)
    assert isinstance(order, MixedOrder)
    drawn = [order.rank_batch(step, rank=0, world_size=1).sample for step in range(100)]
    assert sum(int((batch < parts[0]).sum()) for batch in drawn) == pytest.approx(600, abs=4)


def test_a_set_smaller_than_the_lanes_is_named(digits: Path):
    train = [str(digits / "one/train"), str(digits / "two/val")]
    ours = recipe(train, str(digits / "one/val"), data={"lanes": 128}, global_batch_size=128)
    data = opened(ours)
    plan = plan_stage(ours, stage="pretrain", samples_per_epoch=data.train.num_samples, world_size=1)
    with pytest.raises(UserError, match="data set 2 of the mixture holds only"):
        training_order(ours, data=data, plan=plan)


def test_other_classes_are_refused(digits: Path):
    with pytest.raises(UserError, match=r"classes of train .* differ"):
        opened(recipe(str(digits / "one/train"), str(digits / "other/val")))
    with pytest.raises(UserError, match="cannot be mixed"):
        opened(recipe([str(digits / "one/train"), str(digits / "other/train")], str(digits / "one/val")))


def test_tars_of_another_tool_say_where_their_labels_are(tagged: Path):
    single = {"shards": str(tagged), "label": "json:one"}
    both = {"eval_overlap": "allow"}
    data = opened(recipe(single, single, **both))
    assert data.train.classes == ("0", "1", "2") and data.train.num_samples == 20
    multi = {"shards": str(tagged), "label": "json:tags", "kind": "multi"}
    data = opened(recipe(multi, multi, loss="sigmoid", **both))
    assert data.train.is_multi_label and data.train.classes == ("all", "blue", "red")
    with pytest.raises(UserError, match=r"stages.pretrain.loss is softmax.*use sigmoid"):
        opened(recipe(multi, multi, **both))
    with pytest.raises(UserError, match="json"):
        opened(recipe(str(tagged), str(tagged), **both))


def test_a_missing_tar_is_more_than_the_default_budget_and_may_be_allowed(tmp_path: Path):
    pack("digits", tmp_path / "d", classes=("0", "1"), samples_per_shard=30, report=lambda line: None)
    folder = tmp_path / "d/train"
    lost = sorted(folder.glob("*.tar"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=rf"{lost.name}.*images count as lost.*max_corrupt_share 0.001"):
        opened(recipe(str(folder), str(folder)))
    data = opened(recipe(str(folder), str(folder), data={"max_corrupt_share": 0.2}, eval_overlap="allow"))
    assert lost.name in data.train.damage[0] and data.train.lost_samples > 20


def test_a_missing_tar_of_another_tool_too(tagged: Path):
    spec = {"shards": str(tagged / "{0..2}.tar"), "label": "json:one"}
    with pytest.raises(UserError, match=r"2\.tar: there is no such tar; 10 of 20 images count as lost"):
        opened(recipe(spec, spec))
    assert opened(recipe(spec, spec, data={"max_corrupt_share": 0.5}, eval_overlap="allow")).train.num_samples == 20
