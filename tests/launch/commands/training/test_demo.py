"""The demo's choices and its table; the demo itself is run by `make demo` and, as a pipeline, in tests/integration."""

import re
from pathlib import Path
from typing import get_args

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.recognise import open_source
from shardvit.launch.commands.training import demo
from shardvit.launch.commands.training.demo import CHOICES, comparison, next_commands
from shardvit.launch.commands.training.demo import _machine as machine
from shardvit.launch.commands.training.demo import _shard_paths as shard_paths
from shardvit.launch.commands.training.demo import _source as source
from shardvit.model.formats.export import formats_of
from shardvit.model.vocabulary import ExportFormat
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.finetuning import FinetuneStage
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.initial_model import StageStart, stage_model
from tests.conftest import ROOT

TRANSFERRED = [data for data, choice in CHOICES.items() if choice.transfer_classes]


@pytest.mark.parametrize("data", TRANSFERRED)
def test_seven_classes_are_trained_on_and_three_others_transferred_to(data):
    choice = CHOICES[data]
    assert len(set(choice.pretrain_classes)) == 7
    assert len(set(choice.transfer_classes)) == 3
    assert not set(choice.pretrain_classes) & set(choice.transfer_classes)


def test_the_digits_have_these_classes():
    choice = CHOICES["digits"]
    assert set(choice.pretrain_classes) | set(choice.transfer_classes) == set(open_source("digits").classes)


@pytest.mark.parametrize("data", TRANSFERRED)
def test_the_comparison_differs_from_the_fine_tuning_in_its_start_alone(data):
    recipe, scratch = load_recipe(CHOICES[data].recipe), load_recipe(f"{CHOICES[data].recipe}_scratch")
    ours, theirs = recipe.stages.finetune, scratch.stages.finetune
    assert isinstance(ours, FinetuneStage) and isinstance(theirs, FinetuneStage)
    assert scratch.stages.names == ("finetune",)
    assert theirs.model_copy(update={"start": ours.start}) == ours
    assert recipe.model == scratch.model and recipe.seed == scratch.seed and recipe.engine == scratch.engine
    assert ours.image_size == 1.5 * recipe.train_stage("pretrain").image_size


def test_the_recipe_that_one_is_told_to_copy_makes_models_that_every_program_loads():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for text in (page, next_commands("digits", runs_root=Path("runs"))):
        (name,) = set(re.findall(r"recipes (\w+) > my\.yaml", text))
        recipe = load_recipe(name)
        meta = stage_model(recipe, stage="finetune", classes=["a"], start=StageStart())
        assert formats_of(meta) == (list(get_args(ExportFormat)), {})


@pytest.mark.parametrize("recipe", ["digits", "digits_scratch"])
def test_shards_elsewhere_are_told_to_the_recipe(recipe):
    changed = load_recipe(recipe, overrides=shard_paths(recipe, "digits", Path("/else")))
    finetune = changed.train_stage("finetune")
    assert [each.shards for each in finetune.train or ()] == ["/else/digits-transfer/train"]
    assert finetune.eval and finetune.eval.shards == "/else/digits-transfer/val"
    assert shard_paths(recipe, "digits", Path("shards")) == []


def test_cifar10_is_taken_from_the_folder_at_hand_or_from_where_it_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz.*--source"):
        source("cifar10", None)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar-10-binary.tar.gz").touch()
    assert source("cifar10", None) == "cifar-10-binary.tar.gz"  # as published, before a folder
    assert source("cifar10", Path("else")) == "else"
    assert source("digits", None) == "digits"
    with pytest.raises(UserError, match="--source"):
        source("digits", Path("cifar10"))


def test_cifar10_is_one_shard_set_for_both_stages():
    changed = load_recipe("cifar10", overrides=shard_paths("cifar10", "cifar10", Path("/else")))
    for stage in (changed.train_stage("pretrain"), changed.train_stage("finetune")):
        assert [each.shards for each in stage.train or ()] == ["/else/cifar10/train"]
        assert stage.eval and stage.eval.shards == "/else/cifar10/val"


@pytest.mark.parametrize(
    ("flags", "changes"),
    [("amx_bf16", []), ("avx512_bf16 avx512f", []), ("avx512f amx_tile", ["engine.precision=fp32"])],
)
def test_cifar10_is_trained_in_bf16_where_the_processor_has_it(tmp_path, monkeypatch, flags, changes):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"flags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(demo, "Path", lambda _: facts)
    monkeypatch.setattr(demo, "num_gpus", lambda: 0)
    assert (machine("cifar10"), machine("digits")) == (changes, [])


def test_the_table_shows_what_the_records_hold(tmp_path):
    recipe: Recipe = load_recipe("digits")
    folder, scratch = RunFolder(tmp_path, "digits"), RunFolder(tmp_path, "digits-scratch")
    folder.open(recipe)
    scratch.open(load_recipe("digits_scratch"))
    folder.update("pretrain", state="done", images_seen=51200, seconds=61.25, results={"val/top1": 0.98})
    folder.update("swap_head", state="done")
    folder.update("finetune", state="done", images_seen=3200, seconds=5.0, results={"val/top1": 0.97})
    scratch.update("finetune", state="done", results={"val/top1": 0.75})
    lines = comparison(folder, scratch=scratch).splitlines()
    assert lines[0].split("  ")[0] == "stage"
    assert lines[2].split() == ["pretrain", "51,200", "61.2", "16", "px", "0.9800"]
    assert lines[4].split() == ["finetune", "3,200", "5.0", "24", "px", "0.9700", "0.7500"]
    assert "0.75" in lines[4] and "0.75" not in lines[2]
    assert [line.rstrip() for line in comparison(folder, scratch=None).splitlines()[2:]] == [
        line.removesuffix("0.7500").rstrip() for line in lines[2:]
    ]


def test_the_next_commands_name_the_store_and_the_recipe(tmp_path):
    text = next_commands("digits", runs_root=Path("runs"))
    assert "sqlite:///runs/mlflow.db" in text and "run digits --restart finetune" in text
