"""The recipe's own rules: what does not fit together is refused, and the sentence says what to change."""

from copy import deepcopy
from typing import Any

import pytest
from pydantic import ValidationError

from shardvit.pipeline.recipe.io import differences, flatten, load_recipe
from shardvit.pipeline.recipe.optimizer import OptimizerConfig, ScheduleConfig
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.pretraining import MaskedPatchStage
from shardvit.pipeline.runs.run_folder import recipe_digest
from tests.small_recipe import small_stage

TRAIN = small_stage("a", image_size=16, global_batch_size=8, optimizer={"name": "sgd", "lr": 0.1})
TREE: dict[str, Any] = {
    "name": "r",
    "model": {"width": 8, "depth": 1, "heads": 2, "patch_size": 4},
    "stages": {"pretrain": TRAIN, "swap_head": {}, "finetune": {**TRAIN, "image_size": 24}},
}
MASKED = {"stages__pretrain": ..., "stages__masked_patch": TRAIN}


def recipe(**changes: Any) -> Recipe:
    """TREE with dotted keys changed (dots written as `__`); a value of `...` removes the key."""
    tree = deepcopy(TREE)
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ...:
            del node[leaf]
        else:
            node[leaf] = deepcopy(value)
    return Recipe.model_validate(tree)


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        recipe(**changes)
    return str(caught.value)


def pretrain(**keys: Any) -> dict[str, Any]:
    return {f"stages__pretrain__{key}": value for key, value in keys.items()}


def masked(**keys: Any) -> dict[str, Any]:
    return {**MASKED, "stages__masked_patch": TRAIN | keys}


def autoencoder(**keys: Any) -> dict[str, Any]:
    return {"stages__pretrain": ..., "stages__masked_autoencoder": TRAIN | keys}


def test_a_whole_recipe_and_its_defaults():
    whole = recipe()
    assert whole.stages.names == ("pretrain", "swap_head", "finetune")
    assert whole.engine.backend == "deepspeed" and whole.engine.zero_stage == 1 and whole.engine.precision == "bf16"
    assert whole.train_stage("finetune").image_size == 24
    with pytest.raises(KeyError):
        whole.train_stage("swap_head")
    with pytest.raises(ValidationError):
        whole.seed = 1
    first = recipe(**MASKED)
    assert first.stages.names == ("masked_patch", "swap_head", "finetune")
    assert isinstance(first.train_stage("masked_patch"), MaskedPatchStage)


def test_lanes_divide_the_global_batch_whatever_it_is():
    for batch in range(1, 1030, 7):
        made = recipe(**pretrain(global_batch_size=batch))
        lanes = made.lanes(made.train_stage("pretrain"))
        assert batch % lanes == 0 and 1 <= lanes <= 256
        assert not any(batch % more == 0 for more in range(lanes + 1, 257))
    fixed = recipe(data__lanes=3)
    assert fixed.lanes(fixed.train_stage("pretrain")) == 3
    assert fixed.lanes(fixed.train_stage("pretrain"), processes=1024) == 3


@pytest.mark.parametrize("batch", [4096, 32_768, 49_152, 3000])
def test_lanes_are_one_number_for_few_processes_and_one_for_many(batch: int):
    """So the order, and with it resuming, does not depend on their number on either side of 256."""
    made = recipe(**pretrain(global_batch_size=batch))

    def lanes(processes: int) -> int:
        return made.lanes(made.train_stage("pretrain"), processes=processes)

    assert {lanes(processes) for processes in (1, 8, 100, 256)} == {lanes(1)}
    many = [processes for processes in range(257, 4097) if batch % processes == 0]
    assert many and all(batch % lanes(processes) == 0 == lanes(processes) % processes for processes in many)
    base = max(n for n in range(1, 4097) if batch % n == 0)
    assert {lanes(processes) for processes in many if base % processes == 0} == {base}


def test_an_image_size_that_is_no_multiple_of_the_patch_names_the_neighbours():
    text = refusal(stages__finetune__image_size=22)
    assert "stages.finetune.image_size: image size 22 is not a multiple of the patch size 4: take 20 or 24" in text
    assert "take 4" in refusal(**pretrain(image_size=3))
    assert recipe(stages__finetune__image_size=20)
    assert "patch size 16" in refusal(model={"variant": "B/16"}, stages__finetune__image_size=24)


RESNET = {"model": {"variant": "R50x1"}, "stages__pretrain__image_size": 32, "stages__finetune__image_size": 32}
DROPS = pretrain(dropout=0.1, dropout_masks="process")
RELATIVE = {"model__position": "relative", "stages__finetune__image_size": 16}
HELD_OUT = {"shards": "a/train", "part": "held_out", "hold_out": 0.1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Stages that go together.
        ({"stages": {}}, "at least one of masked_patch, masked_autoencoder, pretrain, swap_head and finetune"),
        ({"stages__finetune": ...}, "swap_head comes before finetune"),
        ({"stages__pretrain": ...}, "swap_head needs a model"),
        ({"stages__swap_head__model": "imported"}, "swap_head.model and pretrain both"),
        ({"stages__swap_head": ...}, "there is no swap_head stage: add one, or set start: scratch"),
        ({"stages__finetune__start": "scratch"}, "leave out swap_head"),
        ({"stages__masked_patch": TRAIN}, "masked_patch and pretrain both begin from random weights"),
        ({**MASKED, "stages__swap_head__model": "m"}, "swap_head.model and masked_patch both give the model"),
        ({"stages__finetune__init": "timm"}, "init has no effect with start swap_head"),
        ({"stages__finetune__optimizer__frozen": ["head"]}, "frozen names the head, which swap_head leaves at zero"),
        (pretrain(start="scratch"), "stages.pretrain.start"),
        ({"stages__finetune__head_bias": -10.0}, "stages.finetune.head_bias"),
        # Keys of a stage.
        (pretrain(unmasked_finish="1 epoch"), "unmasked_finish has no effect"),
        (pretrain(loss="sigmoid", label_smoothing=0.5), "label_smoothing 0.5 inverts sigmoid's targets"),
        (pretrain(augment={"crop_area": [0.9, 0.1]}), "crop_area"),
        (pretrain(augment={"crop_area": [0.0, 1.0]}), "crop_area"),
        (pretrain(augment={"crop_ratio": [2, 1]}), "crop_ratio"),
        (pretrain(also_eval={"val": "x"}), "also_eval.val"),
        (pretrain(also_eval={"New Set": "x"}), "New Set"),
        (pretrain(also_eval={"x": {"shards": "x", "weight": 2}}), "weight"),
        (pretrain(also_eval={"x": HELD_OUT}), "also_eval.x is held out"),
        (pretrain(hold_out=1.0), "less than 1"),
        (pretrain(hold_out="0.1"), "hold_out"),  # text would wait for ever
        (pretrain(hold_out=0.1, train=["a", "b"]), "hold_out is of one set"),
        (pretrain(hold_out=0.1, train=HELD_OUT | {"part": "rest"}), "hold_out is of one set"),
        (pretrain(metrics=["top5", "top5"]), "top5 twice"),
        (pretrain(metrics=["mean_average_precision"]), "mean_average_precision"),
        (pretrain(metrics=["f1"]), "metrics"),
        # Masked patch prediction.
        (masked(loss="sigmoid"), "loss has no effect with masked patch prediction"),
        (masked(label_smoothing=0.1), "label_smoothing has no effect"),
        (masked(patch_dropout=0.5), "patch_dropout has no effect"),
        (masked(metrics=["top5"]), "metrics has no effect"),
        (masked(augment={"mixup_alpha": 0.2}), "augment.mixup_alpha has no effect"),
        (masked(augment={"cutmix_alpha": 1.0}), "augment.cutmix_alpha has no effect"),
        (masked(head_bias=-10), "masked_patch.head_bias"),
        (masked(image_size=18), "masked_patch.image_size"),
        # Masked autoencoders.
        (autoencoder(stochastic_depth=0.1), "stochastic_depth has no effect in a masked autoencoder"),
        (autoencoder(loss="sigmoid"), "loss has no effect with masked autoencoder"),
        (autoencoder(mask_ratio=1.0), "mask_ratio"),
        (autoencoder(decoder={"width": 30, "heads": 4}), "heads 4 must divide width 30"),
        (autoencoder(image_size={"from": 4, "to": 8, "over": "50%", "steps": 1}), "images of one size"),
        (autoencoder() | {"model__position": "relative"}, "added once, before patches are left out"),
        (autoencoder() | {"stages__pretrain": TRAIN}, "masked_autoencoder and pretrain both begin"),
        (autoencoder() | {"stages__masked_patch": TRAIN}, "masked_patch and masked_autoencoder both begin"),
        (masked(image_size=4), "4 pixels are a single patch"),
        (masked(image_size=64) | {"model": {"variant": "R50x1"}}, "a pure ResNet has no patch embeddings to corrupt"),
        # The engine, and the kernels.
        ({"engine": {"backend": "accelerate", "zero_stage": 3}}, "zero_stage has no effect with accelerate"),
        ({"engine": {"backend": "accelerate", "overlap": "on"}}, "overlap has no effect with accelerate"),
        (
            {"engine": {"backend": "accelerate", "bucket_elements": 1000}},
            "bucket_elements has no effect with accelerate",
        ),
        ({"engine": {"backend": "accelerate", "offload": "optimizer"}}, "offload has no effect with accelerate"),
        ({"engine": {"zero_stage": 0, "overlap": "off"}}, "overlap has no effect under ZeRO 0"),
        ({"engine": {"bucket_elements": 1001}}, "bucket_elements"),
        ({"engine": {"zero_stage": 0, "offload": "optimizer"}}, "set zero_stage to 1, 2 or 3"),
        ({"engine": {"zero_stage": 2, "offload": "optimizer_and_parameters"}}, "set zero_stage to 3, or offload"),
        ({"engine": {"compile": "blocks", "zero_stage": 3}}, "compile blocks needs zero_stage 0, 1 or 2"),
        ({"engine": {"compile": "blocks"}, **RESNET}, "engine.compile blocks: a pure ResNet"),
        ({"engine": {"attention": "math"}, **RESNET}, "engine.attention has no effect on a pure ResNet"),
        ({"engine": {"compile": "blocks"}, **DROPS}, "stages.pretrain.dropout_masks process: compiled blocks"),
        ({"engine": {"fp32_matmul": "tf32"}}, "fp32_matmul has no effect with precision bf16"),
        ({"engine": {"attention": "flash"}, **RELATIVE}, "engine.attention flash"),
        ({"engine": {"attention": "cudnn"}, **RELATIVE}, "engine.attention cudnn"),
        ({"engine": {"experimental": {"fp8": "rowwise"}}}, "engine.experimental"),
        # Tracking and names.
        ({"tracking": {"alias": "champion"}}, "alias has no effect without register_as"),
        ({"tracking": {"mode": "offline", "system_metrics": True}}, "system_metrics has no effect offline"),
        ({"tracking": {"log_model": False, "register_as": "x"}}, "register_as has no effect"),
        ({"tracking": {"register_as": "a/b"}}, "register_as 'a/b'"),
        ({"tracking": {"register_as": "x", "alias": "v3"}}, "alias 'v3'"),
        ({"tracking": {"register_as": "x", "alias": "a b"}}, "alias 'a b'"),
        (
            {**MASKED, "stages__swap_head": ..., "stages__finetune": ..., "tracking__register_as": "x"},
            "knows no classes",
        ),
        ({"name": "../elsewhere"}, "name"),
        ({"name": "a/b"}, "name"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str):
    assert message in refusal(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"zero_stage": 3}},  # auto compiles nothing there
        {"engine": {"compile": "off", "zero_stage": 3}},
        {"engine": {"compile": "blocks", "zero_stage": 0, "attention": "efficient"}},
        {"engine": {"compile": "blocks", "backend": "accelerate"}},
        {"engine": {"compile": "blocks"}, **pretrain(dropout=0.1)},
        {"engine": {"compile": "off"}, **DROPS},
        {"engine": {"experimental": {"fp8": "off"}}},  # in the run folders of earlier versions
        {"engine": {"fp32_matmul": "tf32", "precision": "fp32"}, **RESNET},
        masked(dropout=0.1, stochastic_depth=0.1, eval_protocol="timm", init="timm"),
        masked(augment={"crop_area": [0.5, 1.0], "rand_augment": {"magnitude": 5}}),
        masked(image_size=64) | {"model": {"variant": "R50+B/16"}, "stages__finetune__image_size": 64},
        pretrain(metrics=["precision_at_1"], loss="sigmoid"),
    ],
    ids=str,
)
def test_what_fits_is_taken(changes: dict[str, Any]):
    assert recipe(**changes)


OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 0.1}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"momentum": 0.5}, "momentum has no effect with adamw"),
        ({"name": "sgd", "eps": 1e-3}, "eps has no effect with sgd"),
        ({"name": "lamb", "first_moment": "bf16"}, "first_moment has no effect with lamb"),
        ({"name": "adafactor", "betas": (0.8, 0.9)}, "betas has no effect with adafactor"),
        ({"weight_decay_unit": "schedule"}, "weight_decay_unit has no effect without decay"),
        ({"weight_decay_on": "matrices"}, "weight_decay_on has no effect without decay"),
        (
            {"name": "lamb", "weight_decay": 0.1, "weight_decay_unit": "schedule"},
            "weight_decay_unit has no effect with lamb",
        ),
        ({"frozen": ["trunk", "head"]}, "nothing is left to train"),
        ({"frozen": ["trunk"], "layer_decay": 0.5}, "layer_decay has no effect with a frozen trunk"),
        ({"frozen": ["head"], "head_lr_factor": 2}, "head_lr_factor has no effect on a frozen head"),
        ({"layer_decay": 0}, "layer_decay"),
        ({"head_lr_factor": 0}, "head_lr_factor"),
    ],
)
def test_an_optimizers_key_that_nothing_would_read_is_refused(keys: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        OptimizerConfig(**{**OPTIMIZER, **keys})


def test_an_optimizer_brings_its_own_defaults_and_a_given_value_wins():
    assert OptimizerConfig(name="muon", lr=0.1).momentum == 0.95
    assert OptimizerConfig(name="muon", lr=0.1, momentum=0.9).momentum == 0.9
    assert OptimizerConfig(name="lamb", lr=0.1).eps == 1e-6
    assert OptimizerConfig(name="adafactor", lr=0.1, first_moment="float32").first_moment == "float32"
    for config in (OptimizerConfig(name="muon", lr=0.1), OptimizerConfig(name="adafactor", lr=0.1)):
        assert OptimizerConfig.model_validate(config.model_dump(exclude_defaults=True)) == config


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"decay": "wsd"}, "ends in a cooldown"),
        ({"decay": "cosine", "cooldown": "10%"}, "cooldown has no effect with decay cosine"),
        ({"decay": "linear", "timescale": "5 steps"}, "timescale has no effect with decay linear"),
        ({"decay": "rsqrt", "end_lr": 1e-5}, "end_lr has no effect with rsqrt without a cooldown"),
        ({"decay": "rsqrt", "timescale": "0 steps"}, "timescale is zero"),
        ({"decay": "constant", "cooldown": "10%"}, "take decay wsd"),
        ({"decay": "constant", "end_lr": 0.1}, "end_lr has no effect"),
    ],
)
def test_a_schedules_key_that_nothing_would_read_is_refused(keys: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        ScheduleConfig(**keys)


def test_an_optimizer_of_whole_parameters_is_refused_to_zero_1_to_3():
    optimizer = {"name": "adafactor", "lr": 0.1}
    for stage in (1, 2, 3):
        said = refusal(stages__finetune__optimizer=optimizer, engine__zero_stage=stage)
        assert "stages.finetune.optimizer.name: adafactor" in said and "engine.zero_stage to 0" in said
    assert recipe(stages__finetune__optimizer=optimizer, engine__zero_stage=0)
    assert recipe(stages__finetune__optimizer=optimizer, engine__backend="accelerate")


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_an_optimizer_of_whole_tensors_is_for_our_own_step_of_zero_1_and_2(name: str):
    optimizer = {"name": name, "lr": 0.1}
    for stage in (0, 1, 2):
        assert recipe(stages__finetune__optimizer=optimizer, engine__zero_stage=stage)
    refused = {
        "engine.zero_stage to 1 or 2": {"engine__zero_stage": 3},
        "engine.precision fp16": {"engine__zero_stage": 1, "engine__precision": "fp16"},
        "engine.offload optimizer": {"engine__zero_stage": 2, "engine__offload": "optimizer"},
    }
    for key, engine in refused.items():
        said = refusal(stages__finetune__optimizer=optimizer, **engine)
        assert "stages.finetune.optimizer.name: " in said and name in said and key in said
    assert recipe(stages__finetune__optimizer=optimizer, engine__zero_stage=0, engine__precision="fp16")


@pytest.mark.parametrize("as_list", [False, True])
def test_what_is_held_out_is_written_as_parts_of_the_training_set(as_list: bool):
    one = {"shards": "a", "label": "cls"}
    plain, part = recipe(**pretrain(train=one)), one | {"hold_out": 0.1}
    parts = {"train": part | {"part": "rest"}, "also_eval": {"minival": part | {"part": "held_out"}}}
    short = recipe(**pretrain(train=[one] if as_list else one, hold_out=0.1))
    assert short == recipe(**pretrain(**parts)) and differences(plain, short)
    assert Recipe.model_validate(short.model_dump(mode="json")) == short
    mine = recipe(**pretrain(hold_out=0.1, also_eval={"minival": "x", "y": "z"})).train_stage("pretrain").also_eval
    assert {name: each.shards for name, each in mine.items()} == {"minival": "x", "y": "z"}
    waiting = recipe(**pretrain(train=None, data="imagenet", hold_out=0.1))  # until its shards are named
    assert waiting.train_stage("pretrain").hold_out == 0.1 and not waiting.train_stage("pretrain").also_eval


TRACKED = {"mode": "online", "register_as": "digits", "alias": "champion", "system_metrics": True}


@pytest.mark.parametrize(
    "changes",
    [
        pretrain(also_eval={"new": "x", "old": {"shards": "y", "label": "cls"}}, metrics=["top5"]),
        {"tracking": TRACKED},
        {"engine": {"compile": "blocks"}},
        {"engine": {"attention": "math"}},
    ],
    ids=str,
)
def test_what_changes_no_number_may_change_between_attempts(changes: dict[str, Any]):
    plain, changed = recipe(model__width=16), recipe(model__width=16, **changes)
    assert changed != plain and differences(plain, changed) == {}
    assert recipe_digest(changed, stage="finetune") == recipe_digest(plain, stage="finetune")
    assert not any("also_eval" in key or "metrics" in key for key in flatten(plain, keys="changed"))
    assert Recipe.model_validate(changed.model_dump(mode="json")) == changed


def test_what_changes_numbers_is_in_the_digests_of_its_stage_and_of_those_that_build_on_it():
    first, other = recipe(**MASKED), recipe(**masked(image_size=24))
    later = recipe(**MASKED, stages__finetune__image_size=16)
    for stage in ("masked_patch", "swap_head", "finetune"):
        assert recipe_digest(first, stage=stage) != recipe_digest(other, stage=stage)
    assert recipe_digest(first, stage="masked_patch") == recipe_digest(later, stage="masked_patch")
    exact, rounded = ({"precision": "fp32", "fp32_matmul": each} for each in ("ieee", "tf32"))
    assert differences(recipe(engine=exact), recipe(engine=rounded)) == {"engine.fp32_matmul": "ieee -> tf32"}


@pytest.mark.parametrize("pair", [("digits", "digits_scratch"), ("cifar10_masked", "cifar10_masked_scratch")])
def test_a_scratch_recipe_differs_in_its_start_alone(pair: tuple[str, str]):
    transferred, scratch = map(load_recipe, pair)
    assert scratch.stages.names == ("finetune",)
    assert transferred.stages.finetune and scratch.stages.finetune
    assert transferred.stages.finetune.model_copy(update={"start": "scratch"}) == scratch.stages.finetune
    assert (transferred.model, transferred.seed, transferred.engine) == (scratch.model, scratch.seed, scratch.engine)
