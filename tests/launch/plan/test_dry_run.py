"""`--dry-run`: a summary whose numbers are those of the run, the same recipe, and nothing started."""

import json
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.run import pipeline_run
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import ExportFormat
from shardvit.pipeline.recipe.io import dump_recipe, load_recipe, parse_recipe
from shardvit.pipeline.recipe.sources import shipped_recipes
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.launch.conftest import Call
from tests.launch.machine import each_once, make_shards, on_shards

PACKED = on_shards(Path("shards"))


MASKED = (
    "masked_patch={train: shards/train, eval: shards/val, image_size: 16, global_batch_size: 8, duration: 8 steps, "
    "optimizer: {name: adamw, lr: 0.1}}"
)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with shards, on a machine without GPUs where nothing may be started."""
    for split in ("train", "val"):
        make_shards(tmp_path / "shards" / split)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline_run, "num_gpus", lambda: 0)
    monkeypatch.setattr(pipeline_run, "run_stage_locally", lambda launch: pytest.fail("a stage was started"))
    return tmp_path


def rows(output: str) -> dict[str, list[str]]:
    """The summary's table: label -> its cells; "batch" is what the global batch is made of."""
    found: dict[str, list[str]] = {}
    for line in output.split("\n#\n")[1].splitlines()[1:]:
        label, *cells = re.split(r"\s{2,}", line.removeprefix("# "))
        found[label or "batch"] = cells
    return found


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_keys_that_are_shown_make_the_same_recipe(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe, keys="changed"))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe
    assert len(dump_recipe(recipe, keys="changed")) < len(dump_recipe(recipe)) / 2


@pytest.mark.parametrize("flags", [[], ["--all-keys"]])
def test_all_that_is_printed_is_a_recipe(call: Call, work: Path, flags: list[str]):
    code, output, error = call("run", "digits", "--dry-run", *flags, *PACKED, "seed=5", "stages.swap_head.model=null")
    assert (code, error) == (0, "")
    (work / "again.yaml").write_text(output)
    assert parse_recipe(work / "again.yaml") == load_recipe("digits", overrides=[*PACKED, "seed=5"])
    assert ("collective_timeout_seconds" in output) == bool(flags)
    assert sorted(path.name for path in work.iterdir()) == ["again.yaml", "shards"]


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([], {}),
        (["model.pool=gap", "model.position=sincos_2d"], {"transformers": "gap", "torchvision": "gap"}),
        (["model.layer_norm_eps=1.0e-12"], dict.fromkeys(("npz", "big_vision"), "1e-12")),
        (
            ["model.resnet_layers=[]"],
            dict.fromkeys(("big_vision", "timm", "transformers", "torchvision"), "ResNet|hybrid"),
        ),
        (["finetune=null", "swap_head=null"], dict.fromkeys(("timm", "transformers"), "head is mlp")),
        (
            ["pretrain=null", "finetune=null", "swap_head=null", MASKED],
            dict.fromkeys(get_args(ExportFormat), "fine-tune"),
        ),
    ],
)
def test_which_formats_will_hold_the_result_is_said_before_it_is_trained(
    call: Call, work: Path, overrides: list[str], refused: dict[str, str]
):
    packed = PACKED[: 4 - 2 * ("finetune=null" in overrides) - 2 * ("pretrain=null" in overrides)]
    code, output, error = call("run", "digits", "--dry-run", *packed, *overrides)
    assert (code, error) == (0, "")
    stage, held = re.findall(r"^# formats of (\w+)/model: (.+)$", output, re.MULTILINE)[0]
    assert stage == ("finetune" if len(packed) == 4 else "pretrain" if packed else "masked_patch")
    found = dict(re.findall(r"^#   not (\w+): (.+)$", output, re.MULTILINE))
    assert set(held.split(", ")) & set(get_args(ExportFormat)) == set(get_args(ExportFormat)) - found.keys()
    assert found.keys() == refused.keys() and all(re.search(why, found[to]) for to, why in refused.items())


def test_the_summary_has_the_numbers_of_the_run(call: Call, work: Path):
    long = "stages.pretrain.duration=16 epochs"
    output = call("run", "digits", "--dry-run", *PACKED, long, "engine.max_micro_batch_size=8")[1]
    recipe = load_recipe("digits", overrides=[*PACKED, long, "engine.max_micro_batch_size=8"])
    table = rows(output)
    stages: tuple[StageName, ...] = ("pretrain", "finetune")
    for number, stage in enumerate(stages):
        config = recipe.train_stage(stage)
        plan = plan_stage(recipe, stage=stage, samples_per_epoch=100, world_size=2)
        head = "mlp" if stage == "pretrain" else "linear"
        model = build_model(recipe.model, image_size=config.image_size, num_classes=2, head=head)
        assert table["steps"][number] == f"{plan.total_steps:,}"
        assert table["parameters"][number] == f"{sum(each.numel() for each in model.parameters()):,}"
        assert table["image size"][number] == f"{config.image_size} px"
        assert table["evaluated every"][number] == f"{plan.eval_steps:,} steps"
        assert table["saved every"][number] == f"{plan.save_steps:,} steps"
        assert table["of them warm-up"][number] == f"{plan.schedule.warmup_steps:,} steps"
        assert table["global batch"][number] == "64"
        assert table["training images"][number] == "100" and table["classes"][number] == "2"
        assert int(table["held-out images"][number]) > 0
    assert table["epochs"][0] == "16"
    assert table["batch"][:2] == ["2 x 4 x 8", "2 x 4 x 8"]
    assert table["state"] == ["new", "new", "new"] and "time" not in table and "?" not in output


def test_a_moving_average_is_in_the_summary_and_only_where_there_is_one(call: Call, work: Path):
    assert "moving average" not in rows(call("run", "digits", "--dry-run", *PACKED)[1])
    output = call("run", "digits", "--dry-run", *PACKED, "stages.finetune.ema.decay=0.75")[1]
    assert "0.75" in rows(output)["moving average"]


def test_one_stage_alone(call: Call, work: Path):
    output = call("run", "digits", "--dry-run", "--stage", "pretrain", *PACKED)[1]
    assert rows(output)["state"] == ["new"]


def test_the_time_is_that_of_an_earlier_attempt(call: Call, work: Path):
    folder = RunFolder(runs_root=Path("runs"), name="digits")
    folder.open(load_recipe("digits", overrides=PACKED))
    folder.update("pretrain", state="running", last_saved_step=400)
    points = [{"perf/images_per_s": speed} for speed in (1.0, 16.0, 16.0)] + [{"val/loss": 3.0}]
    lines = [{"step": n, "images_seen": 0, "time": 0, "metrics": each} for n, each in enumerate(points)]
    (folder.stage("pretrain") / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = rows(call("run", "digits", "--dry-run", *PACKED)[1])
    assert table["time"][0] == "53:20 min (16 images/s)"  # 800 steps of 64 images
    assert table["state"] == ["at step 400", "new", "new"]


@pytest.mark.parametrize("held_out", ["shards/train", "shards/copy"])
@pytest.mark.parametrize("train", ["shards/train", "[shards/more,shards/train]"])
def test_held_out_images_that_are_trained_on_are_refused_unless_they_are_meant(
    call: Call, work: Path, train: str, held_out: str
):
    make_shards(work / "shards" / "more")
    shutil.copytree(work / "shards" / "train", work / "shards" / "copy")
    keys = each_once(*PACKED, f"stages.pretrain.train={train}", f"stages.pretrain.eval={held_out}")
    for flags in (["--dry-run"], []):
        code, output, error = call("run", "digits", *flags, *keys)
        assert (code, output) == (2, "") and f"100 of the 100 images of eval, {held_out}" in error
        assert error.count("\n") == 1 and "stages.pretrain.eval_overlap=allow" in error
    code, output, error = call("run", "digits", "--dry-run", *keys, "stages.pretrain.eval_overlap=allow")
    assert (code, error) == (0, "") and "eval_overlap: allow" in output
    assert call("run", "digits", "--dry-run", *PACKED)[0] == 0


def test_the_shards_need_not_be_there(call: Call, work: Path):
    (work / "empty").mkdir()
    changes = ["stages.pretrain.train=nowhere/train", "stages.finetune.eval=empty", "stages.pretrain.duration=7 epochs"]
    changed = {change.partition("=")[0] for change in changes}
    given = [*(each for each in PACKED if each.partition("=")[0] not in changed), *changes]
    code, output, error = call("run", "digits", "--dry-run", *given)
    assert (code, error) == (0, "")
    table = rows(output)
    assert "! pretrain: nowhere/train is not there yet" in output and "! finetune: empty is not there yet" in output
    assert table["steps"] == ["?", "50"] and table["training images"] == ["?", "100"] and table["epochs"][0] == "7"
    assert table["of them warm-up"][0] == "10%" and table["parameters"][:2] == ["308.5 k + classes", "305,730"]
    assert call("run", "digits", *given)[0] == 2  # for a run they must be
    for wrong, named in (
        ("stages.pretrain.global_batch_size=63", "does not divide among 2 processes"),
        ("stages.finetune.schedule.warmup=60 steps", "warmup takes 60 of 50 steps"),
        ("data.lanes=7", "data.lanes"),
    ):
        code, output, error = call("run", "digits", "--dry-run", *given, wrong)
        assert code == 2 and output == "" and named in error  # what does not depend on them is checked all the same


def test_shards_that_are_there_and_broken_are_refused(call: Call, work: Path):
    (work / "shards" / "train" / "a.tar").unlink()
    code, output, error = call("run", "digits", "--dry-run", *PACKED)
    assert code == 2 and output == "" and "a.tar" in error


def test_a_command_is_never_started(call: Call, work: Path):
    marker = work / "started"
    pipes = [f"stages.{stage}.train=pipe:touch {marker}; cat x.tar" for stage in ("pretrain", "finetune")]
    evals = [each for each in PACKED if ".eval=" in each]
    code, output, _ = call("run", "digits", "--dry-run", *evals, *pipes)
    assert code == 0 and not marker.exists() and "! pretrain: pipe:touch ... x.tar is a command" in output
    (work / "mixed.yaml").write_text(
        f"extends: digits\nstages: {{pretrain: {{train: [shards/train, 'pipe:touch {marker}']}}}}\n"
    )
    assert call("run", "mixed.yaml", "--dry-run", *(each for each in PACKED if "pretrain.train" not in each))[0] == 0
    assert not marker.exists()
    url = "stages.pretrain.train=git:///srv/photos/x.tar"  # fsspec's starts git
    output = call("run", "digits", "--dry-run", *(each for each in PACKED if "pretrain.train" not in each), url)[1]
    assert "! pretrain: git:" in output and "may start programs" in output


def test_what_a_dry_run_prints_is_asked_of_it_alone(call: Call, work: Path):
    code, _, error = call("run", "digits", "--all-keys", *PACKED)
    assert code == 2 and "--all-keys" in error and "--dry-run" in error


def test_a_run_may_not_begin_without_its_shards(work: Path):
    with pytest.raises(UserError, match="nowhere"):
        PipelineRun.open(
            load_recipe("digits", overrides=[*PACKED[1:], "stages.pretrain.train=nowhere"]), runs_root=work / "runs"
        )


def test_the_parts_of_a_set_are_counted(call: Call, work: Path):
    train = next(each.partition("=")[2] for each in PACKED if each.startswith("stages.finetune.train="))
    part = [f"stages.finetune.{use}={{shards: {train}, part: {name}, hold_out: 0.1}}" for use, name in PARTS]
    code, output, _ = call("run", "digits", "--dry-run", *(each for each in PACKED if "finetune" not in each), *part)
    assert code == 0 and (rows(output)["training images"][1], rows(output)["held-out images"][1]) == ("90", "10")


PARTS = (("train", "rest"), ("eval", "held_out"))
