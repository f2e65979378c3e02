"""Every recipe that ships runs: three steps of each stage, by the real code of a rank.

The model is reduced in width and depth (its kind, its head, pooling, positions and patches stay), lengths to three
steps and batches to a few images, shards are a few images of noise; every other key is as shipped. In the suite one
recipe of each combination of keys runs, all others under `-m slow`.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.packing.sources.label_list import LabelList
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import SavedModelMeta, build_described, load_model, save_model
from shardvit.pipeline.recipe.io import dump_recipe, flatten, load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.sources import finetune_sets, shipped_recipes
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.runs.logs import read_metrics
from tests.conftest import ROOT
from tests.model.comparing import randomise

STEPS, SIDE = 3, 40
VIT_BATCH, RESNET_BATCH = 4, 2  # convolutions in bf16 take their time on a processor
MANY_LABELS = ("jft", "jft3b")  # roles with several labels an image
FINETUNE_BASE = "vit_b16_in21k"  # on which the other fine-tuning sets are tried
# Keys that the reduction changes.
SIZES = ("variant", "width", "depth", "heads", "mlp_dim", "patch_size", "resnet_layers", "resnet_width_factor")
LENGTHS = ("duration", "warmup", "timescale", "cooldown", "log_every", "eval_every", "save_every")


def cases() -> dict[str, Recipe]:
    """All recipes, and each fine-tuning set that no recipe has, behind one pre-training."""
    found = {name: load_recipe(name) for name in shipped_recipes()}
    return found | {
        f"{FINETUNE_BASE}+{name.replace('/', '-')}": load_recipe(FINETUNE_BASE, overrides=[f"finetune={name}"])
        for name in finetune_sets()
    }


def signature(recipe: Recipe) -> tuple[str, ...]:
    """What a recipe's keys make the code do: numbers and the sizes of the model do not count."""
    found = set()
    for key, value in flatten(recipe, keys="changed").items():
        last = key.rpartition(".")[2]
        if last in (*SIZES, *LENGTHS, "name", "experiment", "data", "train", "eval", "global_batch_size"):
            continue
        found.add(key if re.fullmatch(r"[-\d.e]+", value) else f"{key}={value}")
    kind = recipe.model.kind
    stem = "" if kind == "resnet" else str(recipe.model.sizes.resnet_layers is not None)
    return (kind, stem, *sorted(found))


# PyTorch's recipes: one of each family in the suite.
ONE_OF = {"deit": "deit_b16_in1k_384", "deit3": "deit3_b16_in1k", "timm": "rsb_a2_s16_in1k"}


def of_each_kind(recipes: dict[str, Recipe]) -> set[str]:
    """The first recipe of each signature; those for a laptop run whole in the demos and their tests."""
    families = {name: path.parent.name for name, path in shipped_recipes().items()}
    recipes = {name: one for name, one in recipes.items() if ONE_OF.get(families.get(name, ""), name) == name}
    first: dict[tuple[str, ...], str] = {}
    for name, recipe in recipes.items():
        if any(stage.data for stage in vars(recipe.stages).values() if isinstance(stage, TrainStage)):
            first.setdefault(signature(recipe), name)
    return set(first.values())


def reduced(recipe: Recipe, *, name: str, shards: Path) -> Recipe:
    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    model = {key: value for key, value in tree["model"].items() if key not in SIZES}
    batch = VIT_BATCH if recipe.model.kind == "vit" and recipe.model.sizes.resnet_layers is None else RESNET_BATCH
    if recipe.model.kind == "resnet":
        model |= {"resnet_layers": [1] * len(recipe.model.resnet.layers)}
    else:
        sizes = recipe.model.sizes
        model |= {"width": 48, "depth": 2, "heads": 3, "mlp_dim": 64, "patch_size": sizes.patch_size}
        if sizes.resnet_layers is not None:
            model["resnet_layers"] = [1] * len(sizes.resnet_layers)
    changes: dict[str, Any] = {"name": name, "model": model, "processes": 1}
    changes["data"] = tree.get("data", {}) | {"workers": 0}
    for stage in tree["stages"]:
        config = getattr(recipe.stages, stage)
        if isinstance(config, TrainStage):
            keys = tree["stages"][stage]
            labels = "many" if config.data in MANY_LABELS else "one"
            keys |= {"train": str(shards / labels / "train"), "eval": str(shards / labels / "val")}
            size = max(batch, 2 * config.augment.repeats)  # two different images
            keys |= {"global_batch_size": size, "duration": f"{STEPS} steps"}
            keys |= {"log_every": "1 steps", "eval_every": "0 steps", "save_every": "0 steps"}
            schedule = keys.setdefault("schedule", {})
            schedule |= {key: "1 steps" for key in ("warmup", "timescale", "cooldown") if key in schedule}
            keys.pop("unmasked_finish", None)
            if "distill" in keys:
                keys["distill"] |= {"teacher": str(shards / "teacher")}
    return Recipe.model_validate(tree | changes)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise with one label an image, and with several."""
    top, draw = tmp_path_factory.mktemp("noise"), np.random.default_rng(0)
    lines = []
    for number in range(20):
        file = top / "images" / f"class{number % 4}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (SIDE, SIDE + number % 5, 3), dtype=np.uint8)).save(file)
        lines.append(
            json.dumps({"path": str(file.relative_to(top / "images")), "label": [f"a{number % 4}", f"b{number % 3}"]})
        )
    (top / "labels.jsonl").write_text("\n".join(lines) + "\n")
    pack(str(top / "images"), top / "one", holdout=0.2, report=lambda line: None)
    pack(
        str(top / "images"), top / "many", labels=LabelList(top / "labels.jsonl"), holdout=0.2, report=lambda line: None
    )
    names = tuple(f"class{number}" for number in range(4))
    config = ModelConfig(width=16, depth=1, heads=2, patch_size=16)
    meta = SavedModelMeta(model=config, image_size=32, num_classes=4, class_names=names, head="linear")
    save_model(top / "teacher", randomise(build_described(meta)).state_dict(), meta=meta)
    return top


def run(recipes: dict[str, Recipe], names: Iterable[str], *, shards: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Three steps of each, in one process for all."""
    files = []
    for name in names:
        files.append(out / f"{name}.yaml")
        files[-1].write_text(dump_recipe(reduced(recipes[name], name=name.replace("+", "-"), shards=shards)))
    worker = Path(__file__).with_name("shipped_recipes_worker.py")
    done = subprocess.run(
        [sys.executable, worker, out, *files],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {file.stem: json.loads((out / f"{file.stem}.json").read_text()) for file in files}


def check(recipes: dict[str, Recipe], found: dict[str, dict[str, Any]], *, out: Path) -> None:
    problems = {name: result["error"] for name, result in found.items() if "error" in result}
    assert not problems, "\n".join(f"{name}: {text}" for name, text in problems.items())
    for name, result in found.items():
        stages = recipes[name].stages.names
        assert list(result["losses"]) == list(stages)
        for stage in stages:
            losses = result["losses"][stage]
            assert len(losses) == (0 if stage == "swap_head" else STEPS) and all(map(math.isfinite, losses)), name
            folder = out / "runs" / name.replace("+", "-") / stage
            assert (folder / "model" / "model.safetensors").is_file()
            if getattr(getattr(recipes[name].stages, stage), "hold_out", None):
                assert any("val_minival/loss" in row.metrics for row in read_metrics(folder / "metrics.jsonl")), name

        swap_head = recipes[name].stages.swap_head
        if swap_head and swap_head.head == "kept":
            top = out / "runs" / name.replace("+", "-")
            before, after = (load_model(top / stage / "model")[1] for stage in ("pretrain", "swap_head"))
            assert all(torch.equal(before[key], after[key]) for key in ("head.weight", "head.bias"))
            assert before["head.weight"].abs().max() > 0


def test_one_recipe_of_each_combination_of_keys_takes_three_steps(shards: Path, tmp_path: Path):
    recipes = cases()
    check(recipes, run(recipes, sorted(of_each_kind(recipes)), shards=shards, out=tmp_path), out=tmp_path)


@pytest.mark.slow
def test_every_other_recipe_takes_three_steps(shards: Path, tmp_path: Path):
    recipes = cases()
    check(
        recipes, run(recipes, sorted(recipes.keys() - of_each_kind(recipes)), shards=shards, out=tmp_path), out=tmp_path
    )


@pytest.mark.parametrize("name", ["vit_l16_in21k", "r50x1_jft", "r50_l16_jft", "cifar10", "deit3_b16_in1k"])
def test_the_reduction_changes_sizes_lengths_and_shards_alone(name: str):
    recipe = load_recipe(name)
    before, after = flatten(recipe), flatten(reduced(recipe, name="small", shards=Path("shards")))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    ours = {*SIZES, *LENGTHS, "name", "processes", "workers", "train", "eval", "global_batch_size"}
    assert {key.rpartition(".")[2] for key in changed} <= ours
