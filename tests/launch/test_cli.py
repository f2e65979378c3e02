"""The command line: every command's help, and every mistake as one sentence, exit code 2, and nothing touched."""

import hashlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from shardvit.launch.cli import COMMANDS, app
from shardvit.launch.run import pipeline_run
from shardvit.pipeline.checkpoint.identity import STATE, checkpoint_identity
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.runs.written_by import revision
from tests.launch.conftest import Call

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
name: mine
processes: 2
model: {width: 16, depth: 1, heads: 2, patch_size: 4}
stages:
  pretrain: &stage
    train: shards/train
    eval: shards/val
    image_size: 8
    global_batch_size: 8
    duration: 4 steps
    optimizer: {name: sgd, lr: 0.1}
  swap_head: {}
  finetune:
    <<: *stage
    image_size: 12
"""


def make_images(root: Path, *, classes: tuple[str, ...] = ("cat", "dog"), each: int = 12) -> None:
    draw = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(each):
            Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(root / name / f"{number}.png")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with images, shards of them, and a recipe."""
    from shardvit.data_shards.packing.pack import pack

    top = tmp_path_factory.mktemp("packed")
    make_images(top / "images")
    pack(str(top / "images"), top / "shards", holdout=0.25, report=lambda _: None)
    (top / "mine.yaml").write_text(RECIPE)
    return top


@pytest.fixture
def work(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `packed` as the working folder, on a machine without GPUs, where starting a process is a failure."""

    def must_not_start(*args: object, **kwargs: object) -> None:
        pytest.fail(f"a process was started: {args}")

    folder = tmp_path / "work"
    shutil.copytree(packed, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(pipeline_run, "num_gpus", lambda: 0)
    monkeypatch.setattr(pipeline_run, "run_stage_locally", must_not_start)
    monkeypatch.setattr(subprocess, "Popen", must_not_start)
    return folder


def tree(root: Path) -> dict[str, str]:
    """Every path below `root`, with a digest of its bytes."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def refused(call: Call, work: Path) -> Callable[..., str]:
    """The sentence with which a command is refused; everything around it is held to the contract."""

    def run(*args: object) -> str:
        before = tree(work)
        code, _, error = call(*args)
        assert code == 2, error
        assert error.startswith("shardvit: ") and error.endswith("\n") and error.count("\n") == 1, error
        assert "Traceback" not in error
        assert tree(work) == before
        return error

    return run


# Help.


@pytest.mark.parametrize("command", [[], ["pack"], ["run"], ["demo"]], ids=lambda command: " ".join(command) or "all")
def test_help(call: Call, command: list[str]):
    code, output, error = call(*command, "--help")
    assert code == 0 and error == ""
    words = {
        "": ["pack", "run", "demo", "Exit codes", "75"],
        "pack": ["SOURCE", "OUT", "--holdout", "--classes", "xamples:", "shardvit pack photos/ shards/photos"],
        "run": ["RECIPE", "--stage", "--restart", "--runs", "--dry-run", "xamples:", "shardvit run digits"],
        "demo": ["--data", "fashion-mnist", "--shards"],
    }
    for word in words["".join(command)]:
        assert word in output, word


@pytest.mark.parametrize("command", ["", *(name for group in COMMANDS.values() for name in group)])
def test_the_help_of_each_command_fits_a_screen(command: str):
    screen = io.StringIO()  # the app keeps the width of its first console
    app.help_print(command.split(), console=Console(width=100, file=screen))
    lines = screen.getvalue().splitlines()
    assert len(lines) <= 50, "\n".join(lines)
    assert max(map(len, lines)) <= 100


def test_no_command_shows_the_help(call: Call):
    assert "Commands" in call()[1]


def test_the_version(call: Call):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert call("--version")[:2] == (0, f"{project['version']} (commit {revision()})\n")


MODULES = """
import json, sys
from shardvit.launch.cli import main
try:
    main()
finally:
    print("MODULES", json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
HEAVY = {"torch", "torchvision", "timm", "deepspeed", "accelerate", "mlflow", "transformers", "jax"}


NOT_FOR_A_MISTAKE = {"numpy", "PIL", "fsspec", "aiohttp", "jinja2", "psutil", "ssl", "asyncio", "braceexpand"}
SUBMIT = ["--nodes", "1", "--time", "1:00:00", "--tasks-per-node", "1"]


@pytest.mark.parametrize(
    "args",
    [
        ["run", "mine.yaml", "model.width=wide"],
        ["run", "mine.yaml", "sed=1", "--dry-run"],
        ["run", "nothing.yaml"],
        ["run", "images/cat/0.png"],
        ["plan", "mine.yaml", "stages.pretrain.duration=10"],
        ["submit", "mine.yaml", "engine.precision=fp8", *SUBMIT],
        *(["--help"], ["demo", "--help"], ["run", "digits", "--dry-run"]),
    ],
    ids=" ".join,
)
def test_help_and_mistakes_come_before_anything_slow_is_imported(packed: Path, args: list[str]):
    """Modules are counted, not seconds: reading a recipe needs pydantic and YAML; checking shards is without torch."""
    done = subprocess.run(
        [sys.executable, "-c", MODULES, *args],
        cwd=packed,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == (0 if "--help" in args or "digits" in args else 2), done.stderr
    modules = set(json.loads(done.stdout.partition("MODULES ")[2]))
    assert "shardvit" in modules and not (HEAVY if "digits" in args else HEAVY | NOT_FOR_A_MISTAKE) & modules


# Mistakes on the command line itself.


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["frobnicate"], "frobnicate"),
        (["run"], "RECIPE"),
        (["run", "mine.yaml", "--stge", "pretrain"], "--stge"),
        (["run", "mine.yaml", "--stage", "train"], "train"),
        (["run", "mine.yaml", "--restart", "all"], "all"),
        (["pack", "images"], "OUT"),
        (["pack", "images", "out", "--holdout", "much"], "much"),
        (["demo", "--data", "imagenet"], "imagenet"),
        (["run", "nothing.yaml"], "there is no recipe nothing.yaml"),
        (["fewshot", "m", "a", "b"], "shardvit transfer MODEL TRAIN_SHARDS EVAL_SHARDS --method fewshot"),
        (["probe", "--help"], "--method probe"),
        (["knn"], "--method knn"),
        (["table8"], "shardvit sweep digits_positions model.position="),
        (["run", "mine.yaml", "--launcher", "pdsh"], "--launcher is no longer a flag of run: hosts are reached"),
        (["run", "mine.yaml", "--launcher=ssh"], "leave it out"),
        (["doctor", "--cache", "there"], "--cache is no longer a flag of doctor"),
        (["run", "mine.yaml", "seed"], "key=value"),
    ],
)
def test_a_wrong_command(refused: Callable[..., str], args: list[str], named: str):
    assert named in refused(*args)


# Bad input to `pack`.


def test_pack_a_missing_or_empty_folder(refused: Callable[..., str], work: Path):
    assert "photos" in refused("pack", "photos", "out")
    (work / "photos").mkdir()
    assert "photos: the folder is empty" in refused("pack", "photos", "out")
    (work / "images" / "emu").mkdir()
    assert "images/emu" in refused("pack", "images", "out")


def test_pack_an_unreadable_image(call: Call, work: Path):
    (work / "images" / "dog" / "broken.png").write_bytes(b"\x89PNG and no more")
    cut = work / "images" / "cat" / "0.png"
    cut.write_bytes(cut.read_bytes()[:-40])
    code, _, text = call("pack", "images", "out")
    assert code == 2 and text.count("\n") == 1
    assert "dog/broken.png" in text and "cat/0.png" in text and "2 of 25" in text
    assert not (work / "out").exists() and (work / "out.unreadable.jsonl").is_file()


def test_pack_over_something_else(refused: Callable[..., str], work: Path):
    assert "shards" in refused("pack", "images", "shards", "--holdout", "0.5")
    assert "images" in refused("pack", "images", "images")
    (work / "out").write_text("a file")
    assert "out" in refused("pack", "images", "out")


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (["--holdout", "0"], "holdout"),
        (["--holdout", "1.5"], "holdout"),
        (["--holdout", "nan"], "holdout"),
        (["--samples-per-shard", "0"], "samples_per_shard|samples-per-shard"),
        (["--classes", "cat,cow"], "cow"),
        (["--classes", "cat,cat"], "cat"),
    ],
)
def test_pack_with_a_wrong_option(refused: Callable[..., str], option: list[str], named: str):
    text = refused("pack", "images", "out", *option)
    assert any(word in text for word in named.split("|"))


# Bad input to `run`.


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["stages.pretrain.optimizer.wieght_decay=0.1"], "did you mean weight_decay?"),
        (["stages.pretrain.global_batch_size=9"], "global_batch_size 9 does not divide among 2 processes"),
        (["processes=3"], "global_batch_size 8 does not divide among 3 processes"),
        (
            ["stages.finetune.global_batch_size=64"],
            "stages.finetune.global_batch_size is 64, but the training set has only 18",
        ),
        (["data.lanes=20", "stages.finetune.global_batch_size=16"], "data.lanes is 20, but the shards hold only 18"),
        (["stages.pretrain.train={shards: shards/train, weight: 2}"], "a weight has no effect"),
        (["data.lanes=3"], "global_batch_size 8 is not a multiple of data.lanes 3"),
        (
            ["stages.finetune.image_size=14"],
            "stages.finetune.image_size: image size 14 is not a multiple of the patch size 4: take 12 or 16",
        ),
        (["stages.pretrain.train=nowhere"], "nowhere"),
        ([f"stages.pretrain.train={'x' * 5000}"], "(5,0"),
        (["stages.pretrain.train=x-{0..999999999}.tar"], "more than 1,000,000 tars"),
        (["--runs", "x" * 300], "(3"),
        (["stages.finetune.eval=shards"], "did you mean shards/"),
        (["stages.pretrain.duration=5%"], "stages.pretrain.duration"),
        (["stages.pretrain.duration=1e999 images"], "stages.pretrain.duration"),
        (["processes=0"], "processes"),
        (["engine.precision=fp16"], "engine.precision fp16 needs a GPU"),
        (["name=../../up"], "name"),
        (["model.heads=3"], "heads"),
        (["model.variant=B/16"], "variant"),
    ],
)
def test_run_with_a_wrong_recipe(refused: Callable[..., str], overrides: list[str], named: str):
    assert named in refused("run", "mine.yaml", *overrides)


def test_run_with_a_misspelt_key_in_the_file(refused: Callable[..., str], work: Path):
    (work / "mine.yaml").write_text(RECIPE.replace("image_size: 12", "image_sise: 12"))
    text = refused("run", "mine.yaml")
    assert "mine.yaml" in text and "stages.finetune.image_sise, did you mean image_size?" in text


def test_run_on_shards_that_lost_a_tar(refused: Callable[..., str], work: Path):
    (tar,) = (work / "shards" / "val").glob("*.tar")
    tar.unlink()
    assert tar.name in refused("run", "mine.yaml")


def write_checkpoint(work: Path, *, content: dict[str, Any]) -> Path:
    folder = work / "runs" / "mine" / "pretrain" / "checkpoints" / "step-00000002"
    folder.mkdir(parents=True)
    (folder / STATE).write_text(json.dumps(content))
    return folder


def begin(work: Path, *overrides: str) -> None:
    """A run folder as `shardvit run` leaves it after an interruption."""
    recipe = load_recipe("mine.yaml", overrides=overrides)
    folder = RunFolder(runs_root=work / "runs", name="mine")
    folder.open(recipe)
    folder.update("pretrain", state="running", last_saved_step=2)
    write_checkpoint(work, content={"identity": checkpoint_identity(recipe, stage="pretrain", processes=2)})


def test_run_on_a_checkpoint_folder_of_another_recipe(refused: Callable[..., str], work: Path):
    begin(work)
    other = checkpoint_identity(load_recipe("mine.yaml", overrides=["seed=9"]), stage="pretrain", processes=2)
    shutil.rmtree(work / "runs" / "mine" / "pretrain" / "checkpoints")
    write_checkpoint(work, content={"identity": other})
    text = refused("run", "mine.yaml")
    assert "step-00000002" in text and "recipe" in text and "--restart pretrain" in text


def test_run_with_a_changed_recipe_shows_the_difference(call: Call, work: Path):
    begin(work)
    before = tree(work)
    code, _, error = call("run", "mine.yaml", "seed=4")
    assert code == 2 and error.startswith("shardvit: ") and "seed: 0 -> 4" in error and "Traceback" not in error
    assert tree(work) == before
    (work / "runs" / "mine" / "recipe.yaml").unlink()
    assert "recipe.yaml is missing" in call("run", "mine.yaml")[2]


def test_restart_with_a_mistake_moves_nothing(refused: Callable[..., str], work: Path):
    begin(work)
    assert "image_size" in refused("run", "mine.yaml", "--restart", "pretrain", "stages.pretrain.image_size=7")


def test_a_good_recipe_passes_every_check(call: Call, work: Path):
    before = tree(work)
    code, output, error = call("run", "mine.yaml", "--dry-run")
    assert (code, error) == (0, "") and "name: mine" in output
    assert tree(work) == before


def test_everything_that_the_user_may_fix_is_reported_by_a_real_process_too(packed: Path, run_cli: Callable[..., Any]):
    done = run_cli("run", "mine.yaml", "stages.pretrain.image_size=9", cwd=packed)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("shardvit: mine.yaml") and done.stderr.count("\n") == 1
