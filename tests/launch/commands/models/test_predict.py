"""`shardvit predict`: lines for people, JSON for programs, and mistakes in one sentence."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.model.config import ModelConfig
from shardvit.model.formats.programs import write_torch_export
from shardvit.model.saved.model_folder import SavedModelMeta, build_described, save_model
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.launch.conftest import Call

CLASSES = ("black", "grey", "white")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that tells dark images from bright ones, as a run, and three images."""
    root = tmp_path_factory.mktemp("work")
    config = ModelConfig(width=16, depth=1, heads=2, patch_size=4, pool="gap")
    meta = SavedModelMeta(model=config, image_size=8, num_classes=3, class_names=CLASSES, head="linear")
    model = build_described(meta).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        norm = model.get_submodule("norm")
        assert isinstance(norm, torch.nn.LayerNorm)
        norm.weight.fill_(1.0)
        model.get_parameter("patch_embed.proj.weight")[0] = 1.0  # feature 0 is the sum of a patch's pixels
        model.get_parameter("head.weight")[:, 0] = torch.tensor([-2.0, 0.0, 2.0])
    run = RunFolder(root / "runs", "shades")
    save_model(run.model("finetune"), model.state_dict(), meta=meta)
    run.update("finetune", state="done")
    (run.path / "recipe.yaml").write_text("name: shades\n")
    write_torch_export(root / "shades.pt2", model, meta=meta)
    (root / "photos" / "more").mkdir(parents=True)
    for name, value in {"dark.png": 10, "more/bright.jpg": 250}.items():
        Image.fromarray(np.full((12, 9, 3), value, np.uint8)).save(root / "photos" / name)
    Image.fromarray(np.full((12, 9), 250, np.uint8)).save(root / "one.png")
    return root


@pytest.fixture(autouse=True)
def _there(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)


def test_a_line_for_each_image(call: Call) -> None:
    code, out, err = call("predict", "runs/shades", "one.png", "photos", "--top", 2)
    assert code == 0
    assert err == "shardvit: the model is runs/shades/finetune/model\n"
    assert out == (
        "one.png:                white 100.0 %, grey 0.0 %\n"
        "photos/dark.png:        black 100.0 %, grey 0.0 %\n"
        "photos/more/bright.jpg: white 100.0 %, grey 0.0 %\n"
    )


def test_json_is_a_list_with_a_line_for_each_image(call: Call) -> None:
    code, out, err = call("predict", "shades.pt2", "photos", "one.png", "--json", "--batch-size", 1)
    assert (code, err) == (0, "")
    answers = json.loads(out)
    assert [answer["image"] for answer in answers] == ["photos/dark.png", "photos/more/bright.jpg", "one.png"]
    for answer, best in zip(answers, ("black", "white", "white"), strict=True):
        predictions = answer["predictions"]
        assert len(predictions) == 3  # all there are, though five were asked for
        assert predictions[0]["class"] == best
        assert all(CLASSES[each["index"]] == each["class"] for each in predictions)
        shares = [each["probability"] for each in predictions]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1)
    assert len(out.splitlines()) == len(answers)
    assert json.loads(out.splitlines()[1].rstrip(",")) == answers[1]


def test_damaged_images_are_named_and_the_others_answered(call: Call, tmp_path: Path) -> None:
    (tmp_path / "b\x1b[31m.png").write_bytes(b"no image")
    (tmp_path / "c.png").write_bytes((Path("one.png")).read_bytes()[:-30])
    (tmp_path / "d.png").write_bytes((Path("one.png")).read_bytes())
    code, out, err = call("predict", "shades.pt2", tmp_path, "one.png", "--top", 1)
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()] == [f"{tmp_path}/d.png", "one.png"]
    lines = err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"shardvit: {tmp_path}/b\\x1b[31m.png: not a readable image")
    assert lines[1].startswith(f"shardvit: {tmp_path}/c.png: not a readable image")
    assert lines[2] == "shardvit: 2 of 4 images could not be read"

    code, out, err_of_json = call("predict", "shades.pt2", tmp_path, "one.png", "--json")
    assert (code, err_of_json) == (1, err)
    answers = json.loads(out)
    assert ["error" in answer for answer in answers] == [True, True, False, False]
    assert answers[0]["image"] == f"{tmp_path}/b\x1b[31m.png"
    assert "predictions" not in answers[0]
    assert answers[0]["error"].startswith("not a readable image")

    code, _, err = call("predict", "shades.pt2", "one.png", "--max-image-pixels", 1)
    assert code == 1 and "of --max-image-pixels" in err
    code, out, _ = call("predict", "shades.pt2", tmp_path / "c.png", "--json")
    assert code == 1
    assert [list(answer) for answer in json.loads(out)] == [["image", "error"]]


def test_names_that_no_encoding_holds(call: Call, tmp_path: Path) -> None:
    """A file name may be any bytes; JSON gives it back."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/na\xefve.png")
    Path(path).write_bytes(Path("one.png").read_bytes())
    code, out, _ = call("predict", "shades.pt2", tmp_path, "--json")
    assert code == 0
    assert json.loads(out)[0]["image"] == path
    code, out, _ = call("predict", "shades.pt2", tmp_path)
    assert code == 0
    assert "na\\udcefve.png" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["shades.pt2"], "name at least one image or folder"),
        (["nowhere", "one.png"], "nowhere"),
        (["nowhere.onnx", "one.png"], "nowhere.onnx"),
        (["one.png", "one.png"], "one.png"),
        (["shades.pt2", "nowhere.png"], "nowhere.png: there is no such image or folder"),
        (["shades.pt2", "runs"], "runs: there is no image in this folder"),
        (["shades.pt2", "one.png", "--top", "0"], "--top: it is 0; give 1 or more"),
        (["shades.pt2", "one.png", "--batch-size", "-1"], "--batch-size: it is -1; give 1 or more"),
        (["shades.pt2", "one.png", "--device", "tpu"], "--device"),
    ],
)
def test_mistakes_are_one_sentence(call: Call, arguments: list[str], says: str) -> None:
    code, out, err = call("predict", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("shardvit: ")
    assert err.count("\n") == 1


def test_on_a_terminal_what_is_too_wide_goes_below(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for columns in ("30", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        found[columns] = call("predict", "shades.pt2", "one.png")
    assert found["30"] == (0, "one.png:\n  100.0 %  white\n    0.0 %  grey\n    0.0 %  black\n", "")
    assert found["100"] == (0, "one.png: white 100.0 %, grey 0.0 %, black 0.0 %\n", "")
