"""The recipe's part about data: short and long forms mean the same, and what has no effect is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.auto_augment import AutoAugment
from shardvit.data_shards.images.color_jitter import ColorJitter
from shardvit.data_shards.loading.erasing import ErasingConfig
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.pipeline.recipe.data import ShardsConfig
from shardvit.pipeline.recipe.io import differences, dump_recipe, load_recipe, parse_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.stage.batches import erasing, eval_transform, mixup, train_transform
from tests.small_recipe import small_recipe, small_stage, write_recipe


def recipe(
    folder: Path, *, train: Any = "a", data: Any = None, overrides: tuple[str, ...] = (), **stage: Any
) -> Recipe:
    keys = {"global_batch_size": 8, **stage, "train": train, "eval": "b"} | {
        k: stage[k] for k in ("eval",) if k in stage
    }
    file = write_recipe(folder / "r.yaml", small_recipe(data=data or {}, pretrain_=small_stage(**keys)))
    return load_recipe(str(file), overrides=overrides)


TWO = [{"shards": "a", "weight": 0.7}, {"shards": "s3://bucket/b", "weight": 0.3}]


@pytest.mark.parametrize(
    ("train", "means"),
    [
        ("a", (ShardsConfig(shards="a"),)),
        ({"shards": "a"}, (ShardsConfig(shards="a"),)),
        (["a", "b"], (ShardsConfig(shards="a"), ShardsConfig(shards="b"))),
        (TWO, (ShardsConfig(shards="a", weight=0.7), ShardsConfig(shards="s3://bucket/b", weight=0.3))),
        (
            {"shards": "x-{0..3}.tar", "label": "json:tags", "kind": "multi"},
            (ShardsConfig(shards="x-{0..3}.tar", label="json:tags", kind="multi"),),
        ),
    ],
)
def test_short_and_long_forms_and_the_resolved_recipe_mean_the_same(tmp_path: Path, train: Any, means: Any):
    ours = recipe(tmp_path, train=train)
    assert ours.train_stage("pretrain").train == means
    (tmp_path / "dumped.yaml").write_text(dump_recipe(ours))
    again = parse_recipe(tmp_path / "dumped.yaml")
    assert again == ours and differences(again, ours) == {}


def test_a_plain_location_stays_plain_in_what_is_printed(tmp_path: Path):
    tree = yaml.safe_load(dump_recipe(recipe(tmp_path)))
    assert tree["stages"]["pretrain"]["train"] == "a" and tree["stages"]["pretrain"]["eval"] == "b"
    ours = recipe(tmp_path, overrides=("stages.pretrain.train=elsewhere",))
    assert ours.train_stage("pretrain").train == (ShardsConfig(shards="elsewhere"),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": [{"shards": "a", "weight": 1}, "b"]}, "give every set a weight, or none"),
        ({"train": {"shards": "a", "weight": 1}}, "a weight has no effect on a single set"),
        ({"train": [{"shards": "a", "weight": 0}, {"shards": "b", "weight": 1}]}, "weight"),
        ({"train": [{"shards": "a", "waight": 1}]}, "waight, did you mean weight?"),
        ({"train": []}, "stages.pretrain.train: the list is empty"),
        ({"train": "https://me:secret@host/x"}, "password or a query string"),
        ({"train": "https://host/x?signature=secret"}, "password or a query string"),
        ({"data": {"cache": {"limit": "much"}}}, "'much' is no size"),
        ({"data": {"max_corrupt_share": 1.5}}, "data.max_corrupt_share"),
        ({"data": {"worker_kind": "fork"}}, "data.worker_kind"),
        ({"eval_crop_share": 0.9}, "has no effect with eval_protocol vit"),
        ({"eval_protocol": "torch"}, "eval_protocol"),
        ({"augment": {"cutmix_share": 0.2, "mixup_alpha": 0.5}}, "set both alphas"),
        ({"augment": {"mixed_share": 0.5}}, "without mixup_alpha or cutmix_alpha"),
        ({"augment": {"auto_augment": "3a", "rand_augment": {"magnitude": 9}}}, "leave one out"),
        ({"augment": {"color_jitter": [0.1, 0.2]}}, r"augment.color_jitter is \[0.1, 0.2\]: give .* three or four"),
        ({"augment": {"color_jitter": [0.1, 0.2, 0.1, 0.6]}}, "augment.color_jitter"),
        ({"augment": {"color_jitter": -0.1}}, "augment.color_jitter"),
        ({"augment": {"random_erasing": {"probability": 0}}}, "random_erasing.probability"),
        ({"augment": {"crop": "simple_random", "crop_area": [0.3, 1.0]}}, "with crop simple_random"),
        ({"augment": {"crop": "simple_random", "resize_size": 9}}, "with crop simple_random"),
        ({"augment": {"interpolation": "random", "antialias": "none"}}, "with interpolation random"),
        ({"target_threshold": 0.2}, "on a loss other than bce"),
        ({"loss": "sigmoid", "target_threshold": 0.2}, "on a loss other than bce"),
        ({"stochastic_depth_rule": "uniform"}, "without stochastic_depth"),
        ({"augment": {"rand_augment": {"magnitude": 9.5}}}, "magnitude"),
        ({"augment": {"crop_area": [0.9, 0.1]}}, "crop_area"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message.replace("?", r"\?")) as caught:
        recipe(tmp_path, **changes)
    assert "secret" not in str(caught.value)


def test_a_command_is_taken_as_it_is(tmp_path: Path):
    train = recipe(tmp_path, train="pipe:curl -H $HEADER https://host/x?a=b").train_stage("pretrain").train
    assert train and train[0].shards == "pipe:curl -H $HEADER https://host/x?a=b"


def test_what_does_not_change_the_samples_may_change_when_a_run_goes_on(tmp_path: Path):
    before = recipe(tmp_path)
    after = recipe(
        tmp_path,
        data={
            "workers": 3,
            "worker_kind": "process",
            "max_corrupt_share": 0.5,
            "cache": {"folder": "c", "limit": "1 GB"},
        },
    )
    assert differences(before, after) == {}
    assert differences(before, recipe(tmp_path, data={"decoder": "pillow"})) == {"data.decoder": "auto -> pillow"}
    fewer = recipe(tmp_path, data={"max_image_pixels": 1_000_000})  # others take the place of larger images
    assert differences(before, fewer) == {"data.max_image_pixels": "50000000 -> 1000000"}
    for pixels in (0, 178_956_971):
        with pytest.raises(ValueError, match="max_image_pixels"):
            recipe(tmp_path, data={"max_image_pixels": pixels})


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"workers": 4}, "thread"),
        ({"workers": 5}, "process"),
        ({"workers": 5, "worker_kind": "thread"}, "thread"),
        ({"workers": 1, "worker_kind": "process"}, "process"),
    ],
)
def test_few_workers_are_threads(tmp_path: Path, data: dict[str, Any], kind: str):
    assert recipe(tmp_path, data=data).data.kind_of_workers(data["workers"]) == kind


def test_every_augmentation_key_reaches_the_data_path(tmp_path: Path):
    augment = {
        "crop_area": [0.2, 0.8],
        "crop_ratio": [0.5, 2.0],
        "interpolation": "bicubic",
        "flip": 0.25,
        "rand_augment": {"num_ops": 3, "magnitude": 7},
        "mixup_alpha": 0.2,
        "cutmix_alpha": 1.0,
        "cutmix_share": 0.75,
    }
    config = recipe(tmp_path, augment=augment, eval_protocol="timm", eval_crop_share=0.95).train_stage("pretrain")
    transform, mixing, evaluation = train_transform(config), mixup(config), eval_transform(config)
    assert (transform.crop_area, transform.crop_ratio, transform.flip) == ((0.2, 0.8), (0.5, 2.0), 0.25)
    assert transform.interpolation == "bicubic" and transform.rand_augment is not None
    assert (transform.rand_augment.num_ops, transform.rand_augment.magnitude) == (3, 7)
    assert mixing is not None
    assert (mixing.mixup_alpha, mixing.cutmix_alpha, mixing.switch_share) == (0.2, 1.0, 0.75)
    assert (evaluation.image_size, evaluation.protocol, evaluation.crop_share) == (8, "timm", 0.95)
    assert mixup(recipe(tmp_path).train_stage("pretrain")) is None


def test_pytorchs_augmentations_reach_it(tmp_path: Path):
    augment = {
        "crop": "simple_random",
        "interpolation": "bicubic",
        "auto_augment": "3a",
        "color_jitter": 0.3,
        "random_erasing": {"probability": 0.25, "count": 2},
        "mixup_alpha": 0.8,
        "mixed_share": 0.5,
    }
    config = recipe(tmp_path, augment=augment).train_stage("pretrain")
    mean = Normalisation(mean=(0.485, 0.456, 0.406))
    transform, mixing = train_transform(config, normalisation=mean), mixup(config)
    assert (transform.crop, transform.interpolation) == ("simple_random", "bicubic")
    assert transform.auto_augment == AutoAugment("3a", "bicubic", fill=(124, 116, 104))
    assert transform.color_jitter == ColorJitter(0.3, 0.3, 0.3, 0.0)
    assert erasing(config) == ErasingConfig(0.25, "pixel", 2)
    assert mixing is not None and mixing.mixed_share == 0.5
    plain = recipe(tmp_path).train_stage("pretrain")
    assert train_transform(plain).auto_augment is train_transform(plain).color_jitter is erasing(plain) is None
    four = recipe(tmp_path, augment={"color_jitter": [0.4, 0.4, 0.2, 0.1]}).train_stage("pretrain")
    assert train_transform(four).color_jitter == ColorJitter(0.4, 0.4, 0.2, 0.1)


@pytest.mark.parametrize(
    "policy",
    [
        "original",
        "originalr",
        "v0",
        "v0r",
        "3a",
        "original-mstd0.5",
        "rand",
        "rand-m9-mstd0.5-inc1",
        "rand-m7-n3-p0.5-mmax20",
        "rand-inc0-t3a",
        "rand-n2-t3aw",
        "rand-tweights-p1",
        "rand-m15-mstd101",
    ],
)
def test_a_policy_that_recipes_take_is_one_that_timm_makes(tmp_path: Path, policy: str):
    config = recipe(tmp_path, augment={"auto_augment": policy}).train_stage("pretrain")
    transform = train_transform(config).auto_augment
    assert transform is not None and transform(Image.new("RGB", (8, 8)), draw=0.3).size == (8, 8)


@pytest.mark.parametrize(
    "policy",
    [
        "originale",
        "original-m3",
        "3a-n2",
        "rand-m9-m5",
        "rand-mstd1-m9-mstd2",
        "rand-x1",
        "rand-p.5",
        "rand-p1.5",
        "rand-n0",
        "rand-n11",
        "rand-m9-",
        "rand-mstd",
        "rand-tother",
        "rand-inc2",
        "augmix-m3",
        "RAND",
    ],
)
def test_a_policy_that_timm_would_misread_is_refused(tmp_path: Path, policy: str):
    with pytest.raises(UserError, match="is none of timm's"):
        recipe(tmp_path, augment={"auto_augment": policy})


def test_googles_data_path_reaches_it_too(tmp_path: Path):
    augment = {"crop": "google", "antialias": "none", "rand_augment": {"magnitude": 15, "ranges": "big_vision"}}
    transform = train_transform(recipe(tmp_path, augment=augment).train_stage("pretrain"))
    assert (transform.crop, transform.antialias, transform.crop_ratio) == ("google", "none", (0.75, 1.33))
    assert transform.rand_augment is not None and transform.rand_augment.ranges == "big_vision"
    augment = {"crop": "resize_and_crop", "resize_size": 12, "interpolation": "area"}
    config = recipe(tmp_path, augment=augment, eval_protocol="big_vision_exact").train_stage("pretrain")
    transform = train_transform(config)
    assert (transform.crop, transform.resize_size, transform.interpolation) == ("resize_and_crop", 12, "area")
    assert eval_transform(config).protocol == "big_vision_exact"
    plain = train_transform(recipe(tmp_path).train_stage("pretrain"))
    assert (plain.crop, plain.crop_ratio, plain.antialias) == ("torchvision", (3 / 4, 4 / 3), "antialiased")
    assert train_transform(recipe(tmp_path, augment={"antialias": "cast"}).train_stage("pretrain")).antialias == "cast"


@pytest.mark.parametrize(
    ("augment", "says"),
    [
        ({"crop": "resize_and_crop"}, "resize_size"),
        ({"crop": "resize_and_crop", "resize_size": 7}, "augment.resize_size 7"),
        ({"crop": "resize_and_crop", "resize_size": 9, "crop_area": [0.1, 1]}, "crop_area has no effect"),
        ({"crop": "resize_and_crop", "resize_size": 9, "crop_ratio": [0.75, 1.33]}, "crop_ratio has no effect"),
        ({"crop": "google", "resize_size": 9}, "resize_size has no effect"),
        ({"interpolation": "bicubic", "antialias": "none"}, "antialias has no effect"),
        ({"interpolation": "area", "antialias": "none"}, "antialias has no effect"),
        ({"interpolation": "area", "antialias": "cast"}, "antialias has no effect"),
        ({"crop_ratio": 0.5}, "two numbers"),
        ({"crop": "googel"}, "google"),
    ],
)
def test_crops_that_mean_nothing_are_refused(tmp_path: Path, augment: dict[str, Any], says: str):
    with pytest.raises(UserError, match=says):
        recipe(tmp_path, augment=augment)


REST = {"shards": "a", "part": "rest", "hold_out": 0.02}


@pytest.mark.parametrize(
    ("train", "eval_", "key"),
    [
        ({"shards": "a", "part": "rest"}, "b", "hold_out"),
        ({"shards": "a", "hold_out": 0.1}, "b", "part"),
        ({"shards": "a", "part": "rest", "hold_out": 1}, "b", "hold_out"),
        ({"shards": "a", "part": "other", "hold_out": 0.1}, "b", "part"),
        (REST, {**REST, "part": "held_out", "hold_out": 0.03}, "hold_out"),
        ("a", {**REST, "part": "held_out"}, "part: rest"),
        ([{"shards": "b"}, {"shards": "a"}], {**REST, "part": "held_out"}, "part: rest"),
    ],
)
def test_a_part_needs_its_share_and_the_same_on_both_sides(tmp_path: Path, train: Any, eval_: Any, key: str):
    with pytest.raises(UserError, match=key):
        recipe(tmp_path, train=train, eval=eval_)


def test_a_part_is_written_into_the_resolved_recipe(tmp_path: Path):
    ours = recipe(tmp_path, train=REST, eval={**REST, "part": "held_out"})
    (tmp_path / "dumped.yaml").write_text(dump_recipe(ours))
    assert parse_recipe(tmp_path / "dumped.yaml") == ours
    other = recipe(tmp_path, train={**REST, "hold_out": 0.03})
    assert differences(ours, other)["stages.pretrain.train.hold_out"] == "0.02 -> 0.03"
