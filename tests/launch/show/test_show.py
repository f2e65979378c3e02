"""`shardvit show`: the page and its files, for shards and recipes; nothing else is touched; mistakes are a sentence."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.shards.manifest import read_manifest
from tests.launch.conftest import Call
from tests.launch.pages.test_page import Elements

HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\alpha$\x1b[2J")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 images of 3 classes with hostile names, 8 more held out."""
    root, draw = tmp_path_factory.mktemp("show"), np.random.default_rng(0)
    for number in range(40):
        folder = root / "images" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        size = (10 + number % 4, 9, 3)
        Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{number}.png")
    pack(str(root / "images"), root / "shards", holdout=0.2, samples_per_shard=6, report=lambda line: None)
    for manifest in (root / "shards").glob("*/manifest.json"):
        content = json.loads(manifest.read_text())
        content |= {"classes": HOSTILE, "label_map": {name: number for number, name in enumerate(HOSTILE)}}
        manifest.write_text(json.dumps(content))
    return root / "shards"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe_file(tmp_path: Path, packed: Path, **augment: object) -> Path:
    stage = {
        "train": str(packed / "train"),
        "eval": str(packed / "val"),
        "image_size": 8,
        "global_batch_size": 8,
        "duration": "10 steps",
        "optimizer": {"name": "adamw", "lr": 0.001},
        "augment": augment,
    }
    model = {"width": 8, "depth": 1, "heads": 2, "patch_size": 4}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "model": model, "stages": {"pretrain": stage}}))
    return path


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_splits_gives_a_page_with_each(call: Call, packed: Path, tmp_path: Path) -> None:
    code, out, _ = call("show", packed, "--images", 9)
    page = tmp_path / out.splitlines()[-1]
    assert code == 0 and page == tmp_path / "show" / "shards" / "index.html"
    names = {f"{split}_{name}" for split in ("train", "val") for name in ("contact_sheet", "label_histogram")}
    names |= {f"{split}_image_sizes" for split in ("train", "val")}
    assert files(page.parent) == {"index.html"} | {f"{name}.{end}" for name in names for end in ("png", "svg")}
    assert files(tmp_path) == {f"show/shards/{name}" for name in files(page.parent)}
    seen = Elements(page.read_text())
    alternatives = [attributes["alt"] for tag, attributes in seen.tags if tag == "img"]
    assert len(alternatives) == 6 and all(alternatives)
    for split in ("train", "val"):
        manifest = read_manifest(packed / split)
        assert f"{manifest.num_samples} images of 3 classes in {len(manifest.shards)} shards" in seen.text
    for png in page.parent.glob("*.png"):
        pixels = np.asarray(Image.open(png).convert("L"))
        assert pixels.std() > 5, f"{png} is empty"


def test_a_recipe_gives_what_the_model_will_see(call: Call, packed: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, packed, mixup_alpha=0.5)
    code, out, error = call("show", recipe, "--step", 3, "seed=4", "--output", "look", "--images", 5)
    assert (code, out.splitlines()[-1]) == (0, "look/index.html"), error
    pictures = {"training_batch", "augmentation", "evaluation_crops"}
    pictures |= {f"{which}_{name}" for which in ("train", "eval") for name in ("contact_sheet", "label_histogram")}
    pictures |= {"train_image_sizes", "eval_image_sizes"}
    assert {name.removesuffix(".svg") for name in files(tmp_path / "look") if name.endswith(".svg")} == pictures
    seen = Elements((tmp_path / "look" / "index.html").read_text())
    assert "after 3 steps" in seen.text and "mixup" in seen.text
    shares = re.findall(r">(\d+) % ", (tmp_path / "look" / "training_batch.svg").read_text())
    assert len(set(shares)) == 2 and sum(map(int, set(shares))) == 100

    # Names are text on the page and in the pictures.
    assert [tag for tag, _ in seen.tags].count("script") == 2  # the page's own, and its data
    assert not any(name.startswith("on") for _, attributes in seen.tags for name in attributes)
    assert "<script>alert(1)</script>" in seen.text and "$\\alpha$\\x1b[2J" in seen.text
    for svg in (tmp_path / "look").glob("*.svg"):
        assert "<script" not in svg.read_text() and "onerror=" not in re.sub(r">[^<]*<", "><", svg.read_text())


def test_a_shipped_recipe_by_its_name_with_shards(call: Call, packed: Path, tmp_path: Path) -> None:
    sets = [f"train={packed}/train", f"eval={packed}/val", "pretrain.global_batch_size=8", "data.lanes=8"]
    for _ in range(2):  # the second time in place of the first
        code, out, error = call("show", "digits", *sets, "--images", 3)
        assert (code, out) == (0, "show/digits/index.html\n"), error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{shards}", "--images", 0), ("--images", "1 or more")),
        (("{shards}", "--images", 9999), ("--images", "400")),
        (("{shards}", "--labels", -1), ("--labels",)),
        (("{shards}", "--seed", -1), ("--seed",)),
        (("{shards}", "--step", 2), ("--step", "shards")),
        (("{shards}", "--statistics", "--images", 9, "--label", "cls"), ("--label, --images", "--statistics")),
        (("{recipe}", "--statistics"), ("--statistics", "recipe")),
        (("{shards}", "model.depth=3"), ("OVERRIDES",)),
        (("{shards}", "--stage", "pretrain"), ("--stage",)),
        (("{shards}", "--cache", "x"), ("--cache", "local")),
        (("{shards}/train", "--label", "txt"), ("label", "manifest.json")),
        (("{recipe}", "--stage", "finetune"), ("--stage finetune", "pretrain")),
        (("{recipe}", "--stage", "swap_head"), ("swap_head", "pretrain")),
        (("{recipe}", "--step", 10), ("--step 10", "10 steps", "9")),
        (("{recipe}", "--step", -1), ("--step -1",)),
        (("{recipe}", "--label", "cls"), ("--label", "recipe")),
        (("{recipe}", "--output", "{shards}/train"), ("--output", "shards")),
        (("{recipe}", "nonsense=1"), ("nonsense",)),
        (("{images}",), ("manifest.json", "shardvit pack")),
        (("nowhere",), ("nowhere",)),
        (("nowhere.yaml",), ("nowhere.yaml",)),
        (("digits",), ("shards/digits-pretrain",)),
        (("pipe:touch done",), ("command", "only for training and checking")),
    ],
)
def test_a_mistake_is_one_sentence(
    call: Call, packed: Path, tmp_path: Path, arguments: tuple[object, ...], words: tuple[str, ...]
) -> None:
    places = {"shards": packed, "recipe": recipe_file(tmp_path, packed), "images": packed.parent / "images"}
    before = files(tmp_path)
    code, out, error = call("show", *(str(each).format(**places) for each in arguments))
    assert (code, out) == (2, ""), error
    lines = [line for line in error.splitlines() if line.startswith("shardvit: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), error
    assert files(tmp_path) == before and not list(packed.rglob("index.html"))
