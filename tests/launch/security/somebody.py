"""What somebody sends: shards, a recipe, a run with a checkpoint, a model; and a canary that dies when code runs.

The digests always fit what was tampered with, as an attacker would make them.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from shardvit.data_shards.images.decode import read_image
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.manifest import load_manifest
from shardvit.model.saved.model_folder import save_model
from shardvit.model.vit import build_model
from shardvit.pipeline.checkpoint.identity import STATE, checkpoint_identity
from shardvit.pipeline.checkpoint.store import MANIFEST
from shardvit.pipeline.engine.saved_state.state_files import Seal, digest_of
from shardvit.pipeline.recipe.io import dump_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.initial_model import StageStart, stage_model

STEP = "step-00000002"


class Canary:
    """Makes a folder when a pickle of it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@dataclass
class World:
    """Somebody's files, and what the commands are given of them. An attack changes the files and points there."""

    top: Path
    image: Path = field(init=False)
    model: Path = field(init=False)  # what predict, export and import are given
    shards: Path = field(init=False)
    source: Path = field(init=False)
    pack_options: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.image, self.shards, self.source = self.top / "photo.png", self.top / "shards/train", self.top / "photos"
        self.model = self.stage

    @property
    def canary(self) -> Path:
        """Is there when code has run."""
        return self.top / "canary"

    @property
    def ran(self) -> Canary:
        """What a pickle is poisoned with."""
        return Canary(self.canary)

    @property
    def pipe(self) -> str:
        """The same as a location of shards."""
        return f"pipe:mkdir {self.canary}"

    @property
    def recipe(self) -> Path:
        return self.top / "theirs.yaml"

    @property
    def run(self) -> Path:
        return self.top / "runs/theirs"

    @property
    def stage(self) -> Path:
        return self.run / "pretrain"

    @property
    def checkpoint(self) -> Path:
        return self.stage / "checkpoints" / STEP

    def new(self, name: str) -> Path:
        """A file that is not there yet."""
        path = self.top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def change_recipe(self, **stage: Any) -> None:
        """Other keys of its stage, in the recipe and in the run's copy of it."""
        for path in (self.recipe, self.run / "recipe.yaml"):
            tree = yaml.safe_load(path.read_text())
            tree["stages"]["pretrain"] |= stage
            path.write_text(yaml.safe_dump(tree))
        self.seal()

    def forget_length(self) -> None:
        """Its stage.json does not say how long the stage is."""
        RunFolder(runs_root=self.run.parent, name=self.run.name).update("pretrain", total_steps=0)

    def save_engine(self, files: dict[str, Any], *, backend: str = "deepspeed", zero_stage: int = 1) -> None:
        """Replace the checkpoint by one of these files."""
        for path in (self.recipe, self.run / "recipe.yaml"):
            tree = yaml.safe_load(path.read_text())
            tree["engine"] = {**tree["engine"], "backend": backend, "zero_stage": zero_stage}
            path.write_text(yaml.safe_dump(tree))
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        self.checkpoint.mkdir(parents=True)
        for name, content in files.items():
            path = self.checkpoint / name
            path.parent.mkdir(exist_ok=True)
            torch.save(content, path)
        self.seal()

    def seal(self, state: object = None) -> None:
        """Make the checkpoint's state, unless it is given, fit the recipe, and its manifest all files."""
        recipe = Recipe.model_validate(yaml.safe_load(self.recipe.read_text()))
        identity = checkpoint_identity(recipe, stage="pretrain", processes=1)
        (self.checkpoint / STATE).write_text(json.dumps(state or {"identity": identity, "state": {}}))
        (self.checkpoint / MANIFEST).unlink(missing_ok=True)
        files = {
            str(path.relative_to(self.checkpoint)): Seal(path.stat().st_size, digest_of(path))
            for path in self.checkpoint.rglob("*")
            if path.is_file()
        }
        entries = {name: {"bytes": seal.num_bytes, "blake2b": seal.blake2b} for name, seal in files.items()}
        (self.checkpoint / MANIFEST).write_text(json.dumps({"version": 1, "files": entries}))

    def finish(self) -> None:
        """The stage is done: its model counts, not the checkpoint."""
        RunFolder(runs_root=self.run.parent, name=self.run.name).update("pretrain", state="done")
        self.model = self.run


def make_world(top: Path) -> World:
    """Everything whole and harmless, about as little of it as there can be."""
    from PIL import Image

    world = World(top)
    pack("digits", top / "shards", classes=("3", "8"), holdout=0.3, report=lambda line: None)
    Image.new("RGB", (8, 8), "white").save(world.image)
    world.source.mkdir()
    tree = {
        "name": "theirs",
        "model": {"width": 16, "depth": 1, "heads": 2, "patch_size": 4},
        "engine": {"backend": "accelerate", "precision": "fp32"},
        "stages": {
            "pretrain": {
                "train": "shards/train",  # relative: the world is copied
                "eval": "shards/val",
                "image_size": 8,
                "global_batch_size": 16,
                "duration": "6 steps",
                "optimizer": {"name": "adamw", "lr": 0.01},
            }
        },
    }
    recipe = Recipe.model_validate(tree)
    world.recipe.write_text(yaml.safe_dump(tree))
    world.stage.mkdir(parents=True)
    (world.run / "recipe.yaml").write_text(dump_recipe(recipe))
    classes = load_manifest(top / "shards/train").classes
    meta = stage_model(recipe, stage="pretrain", classes=classes, start=StageStart())
    model = build_model(recipe.model, image_size=8, num_classes=len(classes), head="mlp")
    folder = RunFolder(runs_root=world.run.parent, name="theirs")
    described = meta.model_dump(mode="json", exclude_none=True)
    folder.update("pretrain", state="running", last_saved_step=2, total_steps=6, model=described)
    save_model(world.stage / "model", model.state_dict(), meta=meta)
    optimizer = torch.optim.AdamW(model.named_parameters()).state_dict()
    content = {"model": model.state_dict(), "optimizer": optimizer, "scaler": None}
    world.save_engine({"accelerate.pt": content}, backend="accelerate")
    assert read_image(world.image.read_bytes())
    return world


Attack = Callable[[World], None]
"""Tampers with somebody's files."""
