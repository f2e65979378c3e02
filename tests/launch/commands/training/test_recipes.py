"""`shardvit recipes`: every run by name, what each says of itself held against `shardvit plan`, and one resolved."""

from pathlib import Path

import pytest

from shardvit.data_shards.text import show_duration
from shardvit.launch.commands.training.recipes import listing
from shardvit.launch.plan.gathering import make_plan
from shardvit.launch.plan.plan_options import PlanOptions
from shardvit.pipeline.recipe.io import load_recipe, parse_recipe
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.sources import (
    SHIPPED,
    RecipeHeader,
    finetune_sets,
    read_header,
    read_source,
    shipped_recipes,
)
from tests.conftest import ROOT
from tests.launch.conftest import Call

GENERATED = "<!-- shardvit recipes: begin -->\n\n```\n", "```\n\n<!-- shardvit recipes: end -->"


def header(name: str) -> RecipeHeader:
    return read_header(read_source(shipped_recipes()[name]).files, name=name)


ON_GPUS = [name for name in shipped_recipes() if header(name).hardware]


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_time_in_the_header_is_the_plans(name: str):
    head, recipe = header(name), load_recipe(name)
    assert head.hardware
    count, gpu = head.hardware
    plan = make_plan(recipe, PlanOptions(gpus=count, gpu=gpu))
    assert plan.hours is not None and all(stage.problem is None for stage in plan.stages)
    assert head.entry("time") == f"{show_duration(plan.hours * 3600)}, {plan.hours * count:,.0f} GPU-hours"
    assert head.gpu_hours == round(plan.hours * count)
    text = " ".join(plan.warnings)
    assert "does not fit" not in text and "cannot" not in text
    assert "train=SHARDS" in head.entry("command") and name in head.entry("command")
    assert all(head.entry(key) for key in ("result", "source", "chosen"))


@pytest.mark.parametrize("name", ON_GPUS)
def test_every_run_passes_the_dry_run_without_data(
    name: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, output, error = call("run", name, "--dry-run")
    assert code == 0 and "its published size is taken" in output
    assert [line for line in error.splitlines() if "distill.teacher: " not in line] == []
    assert not list(tmp_path.iterdir())


def test_all_are_listed_with_model_data_cost_and_result(call: Call):
    code, output, error = call("recipes")
    assert (code, error) == (0, "")
    rows = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert set(shipped_recipes()) <= rows.keys()
    row = rows["vit_l16_in21k"]
    assert "L/16" in row and "imagenet21k -> imagenet" in row and "GPU-hours (64 x H200)" in row and "85.15" in row
    assert all(f"finetune={name}" in output for name in finetune_sets())
    assert max(map(len, output.splitlines())) <= 150


@pytest.mark.parametrize(
    ("result", "headline"),
    [
        ("top-1 83.73 (light1, decay 0.03) at 384 px, ReaL 90", "top-1 83.73 (light1, decay 0.03) at 384 px"),
        ("78.8 (released; by timm); 74.9 (a, b)", "78.8 (released; by timm)"),
        ("81, ReaL (c, d)", "81"),
        ("not published", "not published"),
    ],
)
def test_a_result_is_not_cut_within_parentheses(result: str, headline: str):
    assert RecipeHeader("", {"result": (result,)}).headline == headline


def test_the_page_beside_the_recipes_is_what_is_listed():
    page = (SHIPPED / "README.md").read_text(encoding="utf-8")
    assert page.partition(GENERATED[0])[2].partition(GENERATED[1])[0] == listing()


def test_the_first_page_has_the_command_and_the_plans_number():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    head = header("vit_l16_in21k")
    assert "shardvit run vit_l16_in21k train=" in page and f"{head.gpu_hours:.0f} GPU-hours" in page
    assert "85.15" in head.entry("result") and "85.15" in page


@pytest.mark.parametrize("name", ["vit_h14_in21k", "digits_scratch", "augreg_b16_in21k", "deit3_b16_in1k"])
def test_one_is_printed_with_its_header_and_is_a_recipe(call: Call, tmp_path: Path, name: str):
    code, output, error = call("recipes", name, "seed=7")
    assert (code, error) == (0, "")
    (tmp_path / "again.yaml").write_text(output)
    assert parse_recipe(tmp_path / "again.yaml") == load_recipe(name, overrides=["seed=7"])
    assert "extends" not in output.split("\nname:")[1]
    written = read_header([tmp_path / "again.yaml"], name=name)
    assert written == header(name) and written.text() == output[: len(written.text())]


def test_every_key_is_printed_when_asked(call: Call):
    assert "collective_timeout_seconds" in call("recipes", "vit_b16_in1k", "--all-keys")[1]
    assert "collective_timeout_seconds" not in call("recipes", "vit_b16_in1k")[1]
    assert call("recipes", "--all-keys")[0] == 2


def test_another_set_and_paths_are_shown(call: Call, tmp_path: Path):
    (tmp_path / "paths.yaml").write_text("imagenet: {train: a, eval: b}\ncifar10: {train: c, eval: d}")
    output = call("recipes", "vit_b16_in1k", "finetune=cifar10", "--data", tmp_path / "paths.yaml")[1]
    for line in ("train: a", "eval: b", "train: c", "eval: d", "duration: 10000 steps"):
        assert f"    {line}\n" in output


def test_a_misspelt_name_is_answered(call: Call):
    code, output, error = call("recipes", "vit_l16_in21")
    assert (code, output) == (2, "") and "did you mean vit_l16_in21k?" in error


def test_what_a_family_says_is_said_once_and_names_its_recipe(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(
        "# B.\n#\n#   command   run NAME train=SHARDS\n#   source    a\n#             b\n"
    )
    (tmp_path / "mine.yaml").write_text("# Mine,\n# mine.\n#\n#   source    c\n#   time      2:00 h, 1,234 GPU-hours\n")
    found = read_header([tmp_path / "base.yaml", tmp_path / "mine.yaml"], name="mine")
    assert (found.description, found.entry("command"), found.entry("source")) == (
        *("Mine,\nmine.", "run mine train=SHARDS", "c"),
    )
    assert (found.hardware, found.gpu_hours) == (None, 1234)
    assert read_header([tmp_path / "base.yaml"], name="x").entry("source") == "a b"


def test_a_run_is_planned_and_tried_without_its_data(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    code, output, _ = call("plan", "vit_l16_in21k", "--gpus", "64", "--gpu", "h200")
    assert code == 0 and "311,948" in output and "14,197,122 images of 21,841 classes" in output
    code, output, error = call("run", "vit_l16_in21k", "--dry-run")
    assert (code, error) == (0, "") and "311,948" in output and "give train=SHARDS and eval=SHARDS" in output
    code, _, error = call("run", "vit_l16_in21k", "train=here", "processes=1")
    assert code == 2 and "give eval=SHARDS, or --data FILE" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_file_of_paths_serves_plan_run_and_submit(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paths.yaml").write_text("imagenet: {train: not-there/train, eval: not-there/val}")
    given = ["--data", "paths.yaml"] if how == "flag" else []
    if how == "environment":
        monkeypatch.setenv("SHARDVIT_DATA", "paths.yaml")
    output = call("run", "vit_b16_in1k", "--dry-run", *given)[1]
    assert "not-there/train is not there yet" in output and "train: not-there/train" in output
    assert "not-there/train" in call("plan", "vit_b16_in1k", *given)[1]
    assert "not-there" in call("run", "vit_b16_in1k", "processes=1", *given)[2]
    slurm = ["--nodes", "1", "--gpus-per-node", "8", "--time", "1:00:00", "--render"]
    assert "not-there" in call("submit", "vit_b16_in1k", *slurm, *given)[2]
    seen: list[Recipe] = []
    monkeypatch.setattr("shardvit.launch.train._run", lambda recipe, **_: seen.append(recipe) or 0)
    assert call("train", "vit_b16_in1k", "--stage", "pretrain", *given)[0] == 0
    assert seen[0].stages.pretrain and seen[0].stages.pretrain.train
