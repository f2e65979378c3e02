"""`shardvit eval` as a user types it: a table, the same JSON by two processes, and mistakes as one sentence."""

import json
import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from shardvit.launch.commands.models.evaluate import WORDS
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import SavedModelMeta, load_model, save_model
from shardvit.model.vit import build_model
from shardvit.pipeline.recipe.vocabulary import METRICS, EvalMetric
from shardvit.pipeline.runs.evaluations import load_evaluation
from tests.conftest import RunCli
from tests.data_shards.streams import pack_noise


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of cats and dogs, and a model that knows them in another order, and a third class."""
    folder = tmp_path_factory.mktemp("eval")
    pack_noise(folder, count=21, samples_per_shard=8)
    config = ModelConfig(width=16, depth=1, heads=2, patch_size=4)
    torch.manual_seed(2)
    model = build_model(config, image_size=12, num_classes=3, head="linear")
    torch.nn.init.normal_(model.get_submodule("head").weight)
    names = ("dog", "horse", "cat")
    meta = SavedModelMeta(model=config, image_size=12, num_classes=3, class_names=names, head="linear")
    save_model(folder / "model", model.state_dict(), meta=meta)
    return folder


def test_two_processes_print_what_one_does(place: Path, run_cli: RunCli, tmp_path: Path):
    asked = ("eval", str(place / "model"), str(place / "out/train"), "--batch", "4", "--no-tracking")
    asked = (*asked, "--output", str(tmp_path / "kept"), "--json")
    alone = run_cli(*asked, "-", cwd=place)
    assert alone.returncode == 0, alone.stderr
    tree = json.loads(alone.stdout)
    assert tree["images"] == 21 and {each["class"]: each["images"] for each in tree["classes"]} == {"dog": 7, "cat": 14}
    assert tree["metrics"]["top1"] == sum(each["right"] for each in tree["classes"]) / 21
    kept = load_evaluation(tmp_path / "kept")
    assert kept.classes == ("dog", "horse", "cat") and kept.metrics["val/loss"] == tree["metrics"]["loss"]
    (tmp_path / "earlier.json").write_text(alone.stdout)  # both places have what the command wrote before
    two = run_cli(*asked, str(tmp_path / "earlier.json"), "--processes", "2", cwd=place)
    assert two.returncode == 0 and (tmp_path / "earlier.json").read_text() == alone.stdout, two.stderr


def test_every_metric_that_may_be_asked_for_has_a_row():
    assert {f"val/{name}" for name in get_args(EvalMetric)} <= WORDS.keys() <= METRICS.keys()


def model_with(place: Path, folder: Path, *, bias: tuple[float, float, float]) -> Path:
    """The model of `place` with a head that looks at nothing."""
    meta, state = load_model(place / "model")
    state["head.weight"] = torch.zeros_like(state["head.weight"])
    state["head.bias"] = torch.tensor(bias)
    save_model(folder / "constant", state, meta=meta)
    return folder / "constant"


def test_a_model_that_gives_one_answer_is_named_beside_the_figures_that_tell(
    place: Path, run_preloaded: RunCli, tmp_path: Path
):
    constant = model_with(place, tmp_path, bias=(0.0, 0.0, 1.0))
    asked = run_preloaded("eval", constant, place / "out/train", "--no-tracking", cwd=place)
    assert asked.returncode == 0, asked.stderr
    rows = {name: words for name, *words in (line.rsplit("  ", 1) for line in asked.stdout.splitlines())}
    figures = {name.strip(): words[0].strip() for name, words in rows.items() if words}
    assert figures["top-1"] == figures["commonest class's share"] == "66.67 %"
    assert figures["balanced accuracy"] == "50.00 %"
    assert "val/images" not in figures
    assert asked.stderr.count("warning") == 1 and "21 of 21 answers" in asked.stderr and "'cat'" in asked.stderr


def test_outputs_that_are_not_finite_are_no_result(place: Path, run_preloaded: RunCli, tmp_path: Path):
    broken = model_with(place, tmp_path, bias=(math.nan, 0.0, 0.0))
    asked = run_preloaded(
        *("eval", broken, place / "out/train", "--no-tracking", "--processes", "2", "--json", "result.json"),
        cwd=tmp_path,
    )
    assert asked.returncode == 2 and "not finite" in asked.stderr and str(broken) in asked.stderr
    assert "top-1" not in asked.stdout and not (tmp_path / "result.json").exists()
    assert "Traceback" not in asked.stderr


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--labels", "real"), "--labels real"),
        (("--protocol", "vit", "--crop-share", "0.9"), "--crop-share"),
        (("--crop-share", "2"), "--crop-share"),
        (("--processes", "0"), "--processes"),
        (("--metrics", "mean_average_precision"), "mean_average_precision"),
        (("--output", "."), "--output"),
    ],
)
def test_a_mistake_is_one_sentence(place: Path, run_cli: RunCli, flags: tuple[str, ...], names: str):
    asked = run_cli("eval", place / "model", place / "out/train", "--no-tracking", *flags, cwd=place)
    assert asked.returncode == 2 and names in asked.stderr and "Traceback" not in asked.stderr
    assert len(asked.stderr.strip().splitlines()) == 1
