"""The recipes that ship have the figures that were published: written down here a second time, from the sources."""

from typing import Any

import pytest

from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.roles import ROLES, role_of
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.sources import finetune_sets, shipped_recipes
from shardvit.pipeline.recipe.stages.train_stage import TrainStage

GOOGLES = [
    name for name, path in shipped_recipes().items() if path.parent.name in ("paper", "augreg", "plain", "scaling")
]

# ViT paper, Table 3: data, variant, epochs, base learning rate, decay, weight decay (times the rate), dropout.
TABLE_3 = {
    "vit_b16_jft": ("jft", "B/16", 7, 8e-4, "linear", 0.1, 0.0),
    "vit_b32_jft": ("jft", "B/32", 7, 8e-4, "linear", 0.1, 0.0),
    "vit_l32_jft": ("jft", "L/32", 7, 6e-4, "linear", 0.1, 0.0),
    "vit_l16_jft": ("jft", "L/16", 7, 4e-4, "linear", 0.1, 0.0),
    "vit_l16_jft_14ep": ("jft", "L/16", 14, 4e-4, "linear", 0.1, 0.0),
    "vit_h14_jft": ("jft", "H/14", 14, 3e-4, "linear", 0.1, 0.0),
    "r50x1_jft": ("jft", "R50x1", 7, 1e-3, "linear", 0.1, 0.0),
    "r50x2_jft": ("jft", "R50x2", 7, 1e-3, "linear", 0.1, 0.0),
    "r101x1_jft": ("jft", "R101x1", 7, 8e-4, "linear", 0.1, 0.0),
    "r152x1_jft": ("jft", "R152x1", 7, 6e-4, "linear", 0.1, 0.0),
    "r152x2_jft": ("jft", "R152x2", 7, 6e-4, "linear", 0.1, 0.0),
    "r152x2_jft_14ep": ("jft", "R152x2", 14, 6e-4, "linear", 0.1, 0.0),
    "r50_b32_jft": ("jft", "R50+B/32", 7, 8e-4, "linear", 0.1, 0.0),
    "r50_b16_jft": ("jft", "R50+B/16", 7, 8e-4, "linear", 0.1, 0.0),
    "r50_l32_jft": ("jft", "R50+L/32", 7, 2e-4, "linear", 0.1, 0.0),
    "r50_l16_jft": ("jft", "R50+L/16", 7, 4e-4, "linear", 0.1, 0.0),
    "r50_l16_jft_14ep": ("jft", "R50+L/16", 14, 4e-4, "linear", 0.1, 0.0),
    "vit_b16_in21k": ("imagenet21k", "B/16", 90, 1e-3, "linear", 0.03, 0.1),
    "vit_b32_in21k": ("imagenet21k", "B/32", 90, 1e-3, "linear", 0.03, 0.1),
    "vit_l16_in21k": ("imagenet21k", "L/16", 90, 1e-3, "linear", 0.03, 0.1),
    "vit_l16_in21k_30ep": ("imagenet21k", "L/16", 30, 1e-3, "linear", 0.03, 0.1),
    "vit_l32_in21k": ("imagenet21k", "L/32", 90, 1e-3, "linear", 0.03, 0.1),
    "vit_l32_in21k_30ep": ("imagenet21k", "L/32", 30, 1e-3, "linear", 0.03, 0.1),
    "vit_b16_in1k": ("imagenet", "B/16", 300, 3e-3, "cosine", 0.3, 0.1),
    "vit_b32_in1k": ("imagenet", "B/32", 300, 3e-3, "cosine", 0.3, 0.1),
    "vit_l16_in1k": ("imagenet", "L/16", 300, 3e-3, "cosine", 0.3, 0.1),
    "vit_l32_in1k": ("imagenet", "L/32", 300, 3e-3, "cosine", 0.3, 0.1),
}
# ViT paper, Table 4: steps, and the learning rates that were tried.
TABLE_4 = {
    "imagenet": (20_000, {0.003, 0.01, 0.03, 0.06}),
    "cifar10": (10_000, {0.001, 0.003, 0.01, 0.03}),
    "cifar100": (10_000, {0.001, 0.003, 0.01, 0.03}),
    "pets": (500, {0.001, 0.003, 0.01, 0.03}),
    "flowers": (500, {0.001, 0.003, 0.01, 0.03}),
    "vtab": (2500, {0.01}),
}


# facebookresearch/deit, README_revenge.md: pixels (whole patches), epochs, rate, weight decay, stochastic depth; then
# fine-tuning's epochs, batch, rate and stochastic depth.
DEIT_3: dict[str, tuple[tuple[Any, ...], tuple[Any, ...] | None]] = {
    "deit3_s16_in1k": ((224, 800, 4e-3, 0.05, 0.05), None),
    "deit3_b16_in1k": ((192, 800, 3e-3, 0.05, 0.2), (20, 512, 1e-5, 0.2)),
    "deit3_l16_in1k": ((192, 800, 3e-3, 0.05, 0.45), (20, 512, 1e-5, 0.45)),
    "deit3_h14_in1k": ((154, 800, 3e-3, 0.05, 0.6), (20, 512, 1e-5, 0.55)),
    "deit3_s16_in21k": ((224, 240, 1e-3, 0.02, 0.05), (50, 2048, 3e-4, 0.05)),
    "deit3_b16_in21k": ((224, 240, 1e-3, 0.02, 0.1), (50, 2048, 3e-4, 0.15)),
    "deit3_l16_in21k": ((224, 240, 1e-3, 0.02, 0.3), (50, 2048, 3e-4, 0.4)),
    "deit3_h14_in21k": ((126, 90, 1e-3, 0.02, 0.5), (50, 2048, 3e-4, 0.45)),
}


def training(recipe: Recipe) -> list[TrainStage]:
    return [stage for name in recipe.stages.names if isinstance(stage := getattr(recipe.stages, name), TrainStage)]


@pytest.mark.parametrize("name", TABLE_3)
def test_pre_training_is_table_3(name: str):
    data, variant, epochs, lr, decay, weight_decay, dropout = TABLE_3[name]
    recipe = load_recipe(name)
    stage = recipe.stages.pretrain
    assert stage
    assert (stage.data, recipe.model.variant, stage.duration) == (data, variant, f"{epochs} epochs")
    optimizer = stage.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("adamw", lr, (0.9, 0.999))
    assert (optimizer.weight_decay, optimizer.weight_decay_unit) == (weight_decay, "lr")
    assert (stage.schedule.decay, stage.schedule.warmup) == (decay, "10000 steps")
    assert (stage.global_batch_size, stage.image_size, stage.dropout) == (4096, 224, dropout)
    assert (stage.loss, optimizer.clip_grad_norm) == ("sigmoid", 1.0 if data == "imagenet" else 0.0)  # its caption
    assert stage.head == ("linear" if recipe.model.kind == "resnet" else "mlp")


@pytest.mark.parametrize("name", TABLE_4)
def test_fine_tuning_is_table_4(name: str):
    steps, rates = TABLE_4[name]
    stage = load_recipe("vit_b16_in21k", overrides=[f"finetune={name}"]).stages.finetune
    assert stage
    assert (stage.data, stage.duration, stage.global_batch_size) == (name, f"{steps} steps", 512)
    assert stage.optimizer.name == "sgd" and stage.optimizer.momentum == 0.9 and stage.optimizer.weight_decay == 0
    assert stage.optimizer.lr in rates and stage.optimizer.clip_grad_norm == 1
    assert (stage.schedule.decay, stage.image_size, stage.loss) == ("cosine", 384, "softmax")


def test_all_runs_of_table_3_are_shipped_and_fine_tuned_on_imagenet():
    for name in TABLE_3:
        finetune = load_recipe(name).stages.finetune
        size = 378 if name.startswith("vit_h14") else 384  # whole patches
        assert finetune and (finetune.data, finetune.image_size) == ("imagenet", size)


@pytest.mark.parametrize("name", GOOGLES)
def test_googles_runs_have_googles_crop_and_a_known_set(name: str):
    for stage in training(load_recipe(name)):
        assert stage.augment.crop == "google" and stage.augment.antialias in ("none", "cast")
        assert stage.augment.crop_area == (0.05, 1.0) and stage.augment.flip == 0.5
        assert stage.data in ROLES and stage.train is stage.eval is None


def test_big_vision_alone_casts_its_training_crops():
    """As areas are averaged by its evaluation, and by its crop for small sets, which both cut off the fraction."""
    for name in GOOGLES:
        pretrain = training(load_recipe(name))[0]
        assert (pretrain.augment.antialias == "cast") == (shipped_recipes()[name].parent.name != "paper"), name
    for name in finetune_sets():
        augment = training(load_recipe("vit_b16_in21k", overrides=[f"finetune={name}"]))[1].augment
        cut_off = augment.antialias == "cast" or augment.interpolation == "area"
        assert cut_off == name.startswith("big_vision/"), name


# big_vision's train[:99%] and so on: vit_i1k.py, vit_s16_i1k.py; transfer.py by data set. Of ImageNet-21k it packs the
# held-out images apart (full[51200:]).
HELD_OUT = {"imagenet": 0.01, "cifar10": 0.02, "cifar100": 0.02, "pets": 0.1, "flowers": 0.1}


def test_big_vision_holds_out_a_part_of_what_it_trains_on():
    for name in GOOGLES:
        folder, stages = shipped_recipes()[name].parent.name, training(load_recipe(name))
        on_imagenet = stages[0].data == "imagenet"
        assert stages[0].hold_out == (0.01 if folder in ("plain", "augreg") and on_imagenet else None)
        for stage in stages[1:]:
            assert stage.hold_out == (0.01 if folder == "augreg" else None)
    for name in finetune_sets():
        finetune = training(load_recipe("vit_b16_in21k", overrides=[f"finetune={name}"]))[1]
        assert finetune.hold_out == HELD_OUT.get(name.removeprefix("big_vision/") if "/" in name else ""), name


def test_the_images_held_out_count_neither_in_epochs_nor_in_a_plan():
    stage = load_recipe("augreg_b16_in1k").train_stage("pretrain")
    role = role_of(stage)
    assert role and (role.images, role.classes) == (1_281_167 - 12_812, 1000)


def test_a_set_needs_no_more_than_its_role_for_any_recipe():
    for name in finetune_sets():
        stage = load_recipe("vit_h14_jft", overrides=[f"finetune={name}", "finetune.data=cifar10"]).stages.finetune
        assert stage and stage.image_size % 14 == 0 and stage.image_size in (378, 504, 518)


def test_the_headline_runs_are_table_2_and_another_set_has_its_own_resolution():
    for name, size in {"vit_h14_jft_518": 518, "vit_l16_jft_512": 512, "vit_l16_in21k_512": 512}.items():
        stage, other = (load_recipe(name, overrides=each).stages.finetune for each in ([], ["finetune=cifar10"]))
        assert stage and stage.ema and other and other.ema is None
        assert (stage.image_size, stage.ema.decay, stage.ema.model) == (size, 0.9999, "ema")
        assert other.image_size == (378 if size == 518 else 384)


def test_vit_g_is_fine_tuned_as_in_appendix_d_of_its_paper():
    stage = load_recipe("vit_g14_jft").stages.finetune
    assert stage and (stage.image_size, stage.duration, stage.schedule.warmup) == (518, "20000 steps", "500 steps")
    assert stage.ema is None and stage.optimizer.lr in (0.03, 0.01), "Polyak averaging was for ViT-G alone"
    other = load_recipe("vit_g14_jft", overrides=["finetune=big_vision/cifar10"]).stages.finetune
    assert other and other.image_size == 378


def test_vtab_has_the_crop_of_big_transfer_or_all_of_the_image():
    stage = load_recipe("vit_b16_in21k", overrides=["finetune=vtab"]).stages.finetune
    assert stage and (stage.augment.crop, stage.augment.resize_size) == ("resize_and_crop", 448)
    whole = ["finetune.augment.crop=google", "finetune.augment.resize_size=null", "finetune.augment.crop_area=[1, 1]"]
    stage = load_recipe("vit_b16_in21k", overrides=["finetune=vtab", "finetune.augment.flip=0", *whole]).stages.finetune
    assert stage and (stage.augment.crop_area, stage.augment.flip) == ((1, 1), 0)


def test_names_are_told_apart_by_the_last_part_of_their_path():
    paths = list(shipped_recipes().values())
    assert len({path.name for path in paths}) == len(paths) > 40


MASKED: dict[str, Any] = {"duration": "1000000 steps", "global_batch_size": 4096, "data": "jft"}


@pytest.mark.parametrize("name", DEIT_3)
def test_deit_3_is_trained_as_its_commands_say(name: str):
    pretrained, finetuned = DEIT_3[name]
    recipe = load_recipe(name)
    first, *rest = training(recipe)
    size, epochs, lr, decay, depth = pretrained
    assert (first.image_size, first.duration, first.global_batch_size) == (size, f"{epochs} epochs", 2048)
    assert (first.optimizer.name, first.optimizer.lr, first.optimizer.weight_decay) == ("lamb", lr, decay)
    assert (first.stochastic_depth, first.stochastic_depth_rule) == (depth, "uniform")
    augment, on_21k = first.augment, "in21k" in name
    assert (augment.auto_augment, augment.crop) == ("3a", "simple_random" if on_21k else "torchvision")
    assert (augment.mixup_alpha, augment.cutmix_alpha, augment.repeats) == (0 if on_21k else 0.8, 1, 1 if on_21k else 3)
    assert (first.loss, first.label_smoothing) == (("softmax", 0.1) if on_21k else ("bce", 0))
    assert bool(rest) == (finetuned is not None)
    for stage in rest:
        assert finetuned and recipe.stages.swap_head
        epochs, batch, lr, depth = finetuned
        assert (stage.image_size, stage.duration, stage.global_batch_size) == (224, f"{epochs} epochs", batch)
        assert (stage.optimizer.lr, stage.stochastic_depth, stage.eval_crop_share) == (lr, depth, 1)
        assert recipe.stages.swap_head.head == ("new" if on_21k else "kept")


def test_deit_is_trained_by_the_defaults_of_its_program():
    for name in ("deit_s16_in1k", "deit_b16_in1k", "deit_b16_in1k_384"):
        for stage in training(recipe := load_recipe(name)):
            scaled = (5e-6 if stage.image_size == 384 else 5e-4) * stage.global_batch_size / 512
            assert stage.optimizer.lr == pytest.approx(scaled) and stage.optimizer.clip_grad_norm == 0
            assert (stage.label_smoothing, stage.stochastic_depth, stage.augment.repeats) == (0.1, 0.1, 3)
            erasing = stage.augment.random_erasing
            assert stage.augment.auto_augment == "rand-m9-mstd0.5-inc1" and erasing and erasing.probability == 0.25
        assert (recipe.stages.finetune is None) == (name != "deit_b16_in1k_384")


def test_masked_patch_prediction_is_appendix_b12():
    stage = load_recipe("vit_b16_masked_jft").stages.masked_patch
    assert stage and {key: getattr(stage, key) for key in MASKED} == MASKED
    assert (stage.optimizer.lr, stage.schedule.decay, stage.schedule.warmup) == (2e-4, "cosine", "10000 steps")
    assert stage.optimizer.clip_grad_norm == 0


# MAE, Tables 3, 8 and 9; FINETUNE.md: epochs before and after, rate and layer decay of fine-tuning, stochastic depth.
MAE = {
    "mae_b16": (1600, 100, 2e-3, 0.65, 0.1),
    "mae_l16": (1600, 50, 4e-3, 0.75, 0.2),
    "mae_l16_800ep": (800, 50, 4e-3, 0.75, 0.2),
    "mae_h14": (1600, 50, 4e-3, 0.75, 0.3),
}


@pytest.mark.parametrize("name", MAE)
def test_masked_autoencoders_are_the_papers(name: str):
    before, after, lr, layer_decay, depth = MAE[name]
    recipe = load_recipe(name)
    first, last = recipe.stages.masked_autoencoder, recipe.stages.finetune
    assert first and last and (first.duration, last.duration) == (f"{before} epochs", f"{after} epochs")
    assert (first.global_batch_size, first.optimizer.lr, first.optimizer.betas) == (4096, 1.5e-4 * 16, (0.9, 0.95))
    assert (first.mask_ratio, first.target, first.init) == (0.75, "normalised", "mae")
    assert (first.decoder.width, first.decoder.depth, first.decoder.heads) == (512, 8, 16)
    assert (first.schedule.warmup, first.augment.crop_area, first.augment.interpolation) == (
        *("40 epochs", (0.2, 1.0), "bicubic"),
    )
    assert (last.global_batch_size, last.schedule.warmup, last.schedule.end_lr) == (1024, "5 epochs", 1e-6)
    assert (last.optimizer.lr, last.optimizer.layer_decay, last.stochastic_depth) == (lr, layer_decay, depth)
    assert (last.optimizer.weight_decay, last.optimizer.clip_grad_norm, last.label_smoothing) == (0.05, 0, 0.1)
    augment = last.augment
    assert (augment.auto_augment, augment.mixup_alpha, augment.cutmix_alpha) == ("rand-m9-mstd0.5-inc1", 0.8, 1.0)
    assert augment.random_erasing is not None and augment.random_erasing.probability == 0.25
    model = recipe.model
    assert (model.pool, model.class_token, model.final_norm) == ("gap", "kept", "pooled")
    assert (model.gelu, model.interpolation) == ("erf", "timm")


def test_distilled_recipes_have_the_published_teachers_and_losses():
    for name, variant in (("deit_s16_distilled_in1k", "S/16"), ("deit_b16_distilled_in1k", "B/16")):
        recipe, plain = load_recipe(name), load_recipe(name.replace("_distilled", ""))
        assert recipe.model.variant == variant and recipe.model.distillation_token == "learned"
        stage, other = recipe.stages.pretrain, plain.stages.pretrain
        assert stage and other and stage.model_copy(update={"distill": None}) == other
        distill = stage.distill
        assert distill and (distill.kind, distill.share) == ("hard", 0.5) and "regnety_160" in distill.teacher
    stage = load_recipe("patient_r50x1_in1k").stages.pretrain  # big_vision, configs/proj/distill/bit_i1k.py
    assert stage and stage.distill and stage.distill.teacher.endswith("R152x2_T_224.npz")
    assert (stage.distill.kind, stage.distill.share, stage.distill.temperature) == ("soft", 1.0, 1.0)
    assert (stage.global_batch_size, stage.duration, stage.hold_out) == (4096, "1200 epochs", 0.02)
    optimizer = stage.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.weight_decay_unit) == (0.03, 0.0003, "schedule")
    assert (optimizer.first_moment, optimizer.clip_grad_norm) == ("bf16", 1.0)
    assert (stage.schedule.decay, stage.schedule.warmup, stage.augment.mixup_alpha) == ("cosine", "5000 steps", 1.0)
