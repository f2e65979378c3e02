"""`shardvit figures`: which images it takes, what it writes, and mistakes in one sentence."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shardvit.data_shards.packing.pack import pack
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import SavedModelMeta, build_described, save_model
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.launch.conftest import Call
from tests.model.comparing import randomise

CLASSES = ("0", "1")
ATTENTION = {"attention_rollout", "attention_maps", "attention_distance"}
WEIGHTS = {"embedding_filters", "position_similarity"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose fine-tuning is done, its shards, a ResNet, and some images."""
    root = tmp_path_factory.mktemp("work")
    pack("digits", root / "shards", classes=("0", "1"), holdout=0.2)
    kinds = {"vit": ModelConfig(width=16, depth=2, heads=2, patch_size=4), "resnet": ModelConfig(resnet_layers=(1,))}
    for name, config in kinds.items():
        meta = SavedModelMeta(model=config, image_size=8, num_classes=2, class_names=CLASSES, head="linear")
        state = randomise(build_described(meta)).state_dict()
        save_model(root / name, state, meta=meta)
        if name == "vit":
            run = RunFolder(root / "runs", "mine")
            shards = [f"stages.finetune.{use}={root / 'shards' / 'val'}" for use in ("train", "eval")]
            run.open(load_recipe("digits_scratch", overrides=["name=mine", *shards]))
            save_model(run.model("finetune"), state, meta=meta)
            run.update("finetune", state="done")
    (root / "photos").mkdir()
    noise = np.random.default_rng(0)
    for number in range(5):
        Image.fromarray(noise.integers(0, 256, (12, 9, 3), np.uint8)).save(root / "photos" / f"{number}.png")
    (root / "photos" / "3.png").write_bytes(b"no image")
    (root / "old.onnx").write_bytes(b"")
    return root


@pytest.fixture(autouse=True)
def _there(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)


def _made(page: str) -> tuple[set[str], dict[str, np.ndarray]]:
    folder = Path(page.strip()).parent
    assert Path(page.strip()).name == "index.html"
    pictures = {path.stem for path in folder.glob("*.png")}
    assert {path.stem for path in folder.glob("*.svg")} == pictures
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert html.count("data:image/") >= len(pictures)
    with np.load(folder / "numbers.npz", allow_pickle=False) as numbers:
        return pictures, dict(numbers)


def test_images_of_a_folder(call: Call) -> None:
    code, out, err = call("figures", "vit", "photos", "--output", "made")
    assert code == 0, err
    assert "3.png" in err  # the damaged one
    pictures, numbers = _made(out)
    assert pictures == ATTENTION | WEIGHTS == numbers.keys()
    assert numbers["attention_rollout"].shape == (4, 2, 2)
    assert numbers["attention_distance"].shape == (2, 2)
    assert numbers["position_similarity"].shape == (1, 4, 4)
    assert torch.isfinite(torch.from_numpy(numbers["attention_maps"])).all()


@pytest.mark.parametrize(
    ("arguments", "images", "folder", "said"),
    [
        (["runs/mine", "--count", "3"], 3, "figures/mine", ""),  # its held-out images
        (["vit", "shards/val", "--count", "2"], 2, "figures/vit", ""),
        (["vit", "--output", "alone"], 0, "alone", "name images"),
        (["vit", "--count", "5", "--output", "alone"], 0, "alone", "name images"),  # in place of the one before
        (["resnet", "photos"], 0, "figures/resnet", "ResNet"),
    ],
)
def test_a_model_has_the_figures_that_its_images_allow(
    call: Call, arguments: list[str], images: int, folder: str, said: str
) -> None:
    code, out, err = call("figures", *arguments)
    assert (code, out) == (0, f"{folder}/index.html\n"), err
    assert said in err
    pictures, numbers = _made(out)
    weights = {"embedding_filters"} if arguments[0] == "resnet" else WEIGHTS
    assert pictures == (ATTENTION if images else set()) | weights
    assert len(numbers.get("attention_rollout", ())) == images


def test_weights_that_are_a_link_out_of_the_run_are_not_looked_at(call: Call, work: Path) -> None:
    weights = work / "runs/mine/finetune/model/model.safetensors"
    weights.rename(work / "mine.safetensors")
    weights.symlink_to(work / "mine.safetensors")
    code, out, err = call("figures", "runs/mine", "--output", "of-link")
    weights.unlink()
    (work / "mine.safetensors").rename(weights)
    assert (code, out) == (2, "") and "model.safetensors is a link out of" in err
    assert not (work / "of-link").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["old.onnx"], ["old.onnx", "exported from"]),
        (["vit", "nowhere/shards"], ["nowhere/shards"]),
        (["vit", "shards/val", "photos"], ["one set of shards"]),
        (["vit", "photos", "--label", "cls"], ["--label"]),
        (["vit", "--classes", "names.txt"], ["--classes"]),
        (["vit", "photos", "--count", "0"], ["--count"]),
        (["vit", "photos", "--device", "cuda"], ["--device cuda"]),
        (["vit", "photos", "--weights", "ema"], ["--weights ema"]),
        (["vit", "photos/3.png"], ["3.png"]),
        (["vit", "photos", "--output", "shards/val"], ["--output"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes(call: Call, arguments: list[str], words: list[str]) -> None:
    if arguments[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    code, out, err = call("figures", *arguments)
    assert code == 2 and out == ""
    assert all(word in err for word in words) and "Traceback" not in err
