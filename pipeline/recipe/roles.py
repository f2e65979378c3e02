"""Data sets by role: a stage says `data: imagenet21k`, and the user names the shards.

As `train=`, `eval=`, `finetune.train=`, `finetune.eval=`, or once for all recipes in a file:

    imagenet21k: {train: /data/imagenet21k/train, eval: /data/imagenet21k/val}
    imagenet: {train: "s3://bucket/imagenet/train", eval: "s3://bucket/imagenet/val"}

Any name is a role; `ROLES` have published sizes, so runs can be planned before packing. Relative paths start at the
current folder, as in a recipe.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.recipe.yaml_text import read_yaml_file

_KEYS = ("train", "eval")

Paths = Mapping[str, Mapping[str, Any]]
"""Role -> "train" and "eval" -> shards as in a recipe."""


@dataclass(frozen=True)
class Role:
    """Published facts about a data set."""

    images: int  # for training
    classes: int | None  # None: depends on the task
    source: str
    packed_from: str = "IMAGES"  # input of `shardvit pack`
    held_out: str = ""  # its option if no evaluation set is published


_HELD_OUT = " --holdout-images 51200"
_JFT_CLASSES = "classes: Big Transfer (arXiv 1912.11370)"
_JFT3B_CLASSES = "classes: big_vision, train_vit_g.py"
_VTAB = "VTAB-1k (arXiv 1910.04867): 800 training and 200 validation images"
_VTAB_CLASSES = {  # Table 2 of the same paper, in its order: natural, specialised, structured
    **{"caltech101": 102, "cifar100": 100, "dtd": 47, "flowers": 102, "pets": 37, "sun397": 397, "svhn": 10},
    **{"eurosat": 10, "resisc45": 45, "camelyon": 2, "retinopathy": 5},
    **{"clevr_count": 8, "clevr_distance": 6, "dmlab": 6, "dsprites_location": 16, "dsprites_orientation": 16},
    **{"kitti_distance": 4, "smallnorb_azimuth": 18, "smallnorb_elevation": 9},
}

ROLES: dict[str, Role] = {
    "imagenet21k": Role(
        14_197_122,
        21_841,
        "fall 2011 release, the paper's; winter 2021: 13,153,500",
        packed_from="fall11_whole.tar",
        held_out=_HELD_OUT,
    ),
    "imagenet": Role(1_281_167, 1000, "ILSVRC 2012", "imagenet/"),
    "jft": Role(303_000_000, 18_291, f"JFT-300M: ViT paper, section 4.1; {_JFT_CLASSES}", held_out=_HELD_OUT),
    "jft3b": Role(3_000_000_000, 29_593, f"JFT-3B: arXiv 2106.04560; {_JFT3B_CLASSES}", held_out=_HELD_OUT),
    "cifar10": Role(50_000, 10, "CIFAR-10", "cifar-10-python.tar.gz"),
    "cifar100": Role(50_000, 100, "CIFAR-100", "cifar-100-python.tar.gz"),
    "pets": Role(3_680, 37, "Oxford-IIIT Pet, trainval", "pets/"),
    "flowers": Role(1_020, 102, "Oxford Flowers-102, train, as in big_vision's transfer.py", "flowers/"),
    "vtab": Role(1000, None, _VTAB, "vtab-1k/TASK/"),
    **{f"vtab_{task}": Role(1000, classes, _VTAB, f"vtab-1k/{task}/") for task, classes in _VTAB_CLASSES.items()},
}


def read_paths(file: Path) -> Paths:
    """Read a file of paths, or raise UserError."""
    tree = read_yaml_file(file)
    if not isinstance(tree, dict) or not all(isinstance(role, str) for role in tree):
        raise UserError(f"{file} names no paths: write lines such as imagenet: {{train: FOLDER, eval: FOLDER}}")
    for role, paths in tree.items():
        if not isinstance(paths, dict) or not paths or set(paths) - set(_KEYS):
            raise UserError(f"{file}: {one_line(role)} must be a group of keys: {{train: FOLDER, eval: FOLDER}}")
        close = [] if role in ROLES else difflib.get_close_matches(role, ROLES, n=1, cutoff=0.8)
        if close and close[0] not in tree:
            raise UserError(f"{file}: {one_line(role)} is no role that ships, did you mean {close[0]}?")
    return tree


def with_paths(tree: dict[str, Any], *, file: Path) -> dict[str, Any]:
    """Add missing paths of stages with a role; reads `file` only if some are missing."""
    stages = tree.get("stages")
    lacking = {
        name: stage
        for name, stage in (stages.items() if isinstance(stages, dict) else ())
        if isinstance(stage, dict) and stage.get("data") is not None and None in map(stage.get, _KEYS)
    }
    if not isinstance(stages, dict) or not lacking:
        return tree
    paths = read_paths(file)
    for name, stage in lacking.items():
        known = paths.get(stage["data"], {}) if isinstance(stage["data"], str) else {}
        lacking[name] = stage | {key: known[key] for key in _KEYS if key in known and stage.get(key) is None}
    return tree | {"stages": stages | lacking}


def role_of(config: TrainStage) -> Role | None:
    """Get the role of the stage's data, without held-out images; None: no role, or the user's own."""
    role = ROLES.get(config.data or "")
    shares = [config.hold_out, *(one.hold_out for one in config.train or () if one.part == "rest")]
    share = next((each for each in shares if each), 0.0)
    return role and replace(role, images=role.images - round(share * role.images))


def missing_paths(recipe: Recipe, *, stage: StageName) -> str | None:
    """Name the stage's missing shards in one sentence; None: it has them."""
    config = recipe.train_stage(stage)
    missing = [key for key in _KEYS if getattr(config, key) is None]
    if not missing:
        return None
    prefix = "" if stage == recipe.stages.trained[0] else f"{stage}."
    keys, role = " and ".join(f"{prefix}{key}=SHARDS" for key in missing), config.data or ""
    images, held_out = (ROLES[role].packed_from, ROLES[role].held_out) if role in ROLES else ("IMAGES", "")
    close = [] if role in ROLES else difflib.get_close_matches(role, ROLES, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return (
        f"stages.{stage} is for {role}{hint}, but its shards are not named: give {keys}, or --data FILE with a line "
        f"{role}: {{train: SHARDS, eval: SHARDS}}; `shardvit pack {images} shards/{role}{held_out}` makes them"
    )
