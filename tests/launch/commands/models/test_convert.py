"""`shardvit import` and `shardvit export`: what their arguments do, what they print; every mistake is one sentence."""

import sys
from pathlib import Path

import pytest
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.saved.model_folder import SavedModelMeta, load_model, read_meta, save_model
from shardvit.model.vit import build_model
from tests.launch.conftest import Call

SMALL = ModelConfig(width=32, depth=1, heads=4, mlp_dim=128, patch_size=4)
SIZES = ("--width", "32", "--depth", "1", "--heads", "4", "--patch-size", "4")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model of ours, and its weights alone as a file of timm's."""
    monkeypatch.chdir(tmp_path)
    model = build_model(SMALL, image_size=8, num_classes=3, head="linear")
    initialise(model, seed=0)
    meta = SavedModelMeta(
        model=SMALL, image_size=8, num_classes=3, class_names=("ant", "bee", "cow"), head="linear", loss="sigmoid"
    )
    save_model(tmp_path / "ours", model.state_dict(), meta=meta)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    return tmp_path


def test_the_trunk_is_the_files_or_what_the_user_says(work: Path, call: Call) -> None:
    code, output, _ = call("import", "weights.pth", "out", *SIZES)
    assert code == 0
    assert output.splitlines()[-1].startswith("out: ") and "8 px, 3 classes; " in output
    meta, state = load_model(work / "out")
    assert meta.model.sizes == SMALL.sizes and meta.class_names == ("0", "1", "2")
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_model(work / "ours")[1].items())


def test_one_key_alone_changes_that_key_and_nothing_else(work: Path, call: Call) -> None:
    before = read_meta(work / "ours")
    for flag, value, key in (
        ("--gelu", "erf", "gelu"),
        ("--layer-norm-eps", "1e-5", "layer_norm_eps"),
        ("--interpolation", "timm", "interpolation"),
    ):
        assert call("import", "ours", f"with-{key}", flag, value)[0] == 0
        after = read_meta(work / f"with-{key}")
        told = float(value) if key == "layer_norm_eps" else value
        assert after == before.model_copy(update={"model": before.model.model_copy(update={key: told})})


def test_another_resolution_and_another_number_of_classes(work: Path, call: Call) -> None:
    code, output, _ = call("import", "ours", "out", "--image-size", "16", "--num-classes", "5")
    assert code == 0 and "16 px, 5 classes" in output and "the head is new, for 5 classes and all zeros" in output
    meta, state = load_model(work / "out")
    assert state["pos_embed"].shape == (1, 1 + 16, 32) and not state["head.weight"].any()
    assert (meta.class_names, meta.loss) == (("0", "1", "2", "3", "4"), "softmax")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(work: Path, call: Call, value: float) -> None:
    _, state = load_model(work / "ours")
    state["blocks.0.mlp.fc1.bias"][3] = value
    state["head.bias"][0] = value
    torch.save(state, work / "broken.pth")
    code, _, error = call("import", "broken.pth", "out", *SIZES, "--num-classes", "5")
    assert code == 2 and "blocks.0.mlp.fc1.bias" in error and not (work / "out").exists()
    state["blocks.0.mlp.fc1.bias"][3] = 0
    torch.save(state, work / "broken.pth")
    assert call("import", "broken.pth", "out", *SIZES, "--num-classes", "5")[0] == 0  # the broken head is dropped
    code, _, error = call("import", "broken.pth", "out", *SIZES, "--force")
    assert code == 2 and "head.bias" in error


def test_the_loss_is_asked_for_or_assumed_with_a_note(work: Path, call: Call) -> None:
    for arguments, loss in (((), "softmax"), (("--loss", "sigmoid"), "sigmoid")):
        code, output, _ = call("import", "weights.pth", "out", *SIZES, *arguments, "--force")
        assert code == 0 and ("taken as softmax" in output) == (not arguments)
        assert read_meta(work / "out").loss == loss
    assert call("import", "ours", "out")[0] == 2  # it may be another model that is there
    assert call("import", "ours", "out", "--force")[0] == 0
    assert read_meta(work / "out").loss == "sigmoid"  # as its record says


def test_a_shallow_model_of_a_known_width_is_imported_if_the_user_says_so(work: Path, call: Call) -> None:
    model = build_model(
        ModelConfig(width=192, depth=2, heads=3, patch_size=4), image_size=8, num_classes=3, head="linear"
    )
    torch.save(initialise(model, seed=0) or model.state_dict(), work / "shallow.pth")
    code, _, error = call("import", "shallow.pth", "out")
    assert code == 2 and "shallow.pth has 2 blocks where Ti has 12" in error
    code, _, error = call("import", "shallow.pth", "out", "--depth", "3")
    assert code == 2 and "--depth 3: the file has 2 blocks" in error
    assert call("import", "shallow.pth", "out", "--depth", "2")[0] == 0
    assert read_meta(work / "out").model.sizes.depth == 2


def test_a_wrong_ending_is_told_before_anything_is_loaded(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("shardvit.model.formats.export", "shardvit.pipeline.using.find_model", "torch"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it is an error
    code, _, error = call("export", "missing", "--format", "onnx", "--out", "x.pt")
    assert code == 2 and "--output x.pt: the name of such a file must end in .onnx" in error


def test_a_runs_folder_is_told_from_a_models(work: Path, call: Call) -> None:
    (work / "run").mkdir()
    (work / "run/recipe.yaml").touch()
    code, _, error = call("import", "run", "out")
    assert code == 2 and "run is a run's folder: give a stage's model, run/STAGE/model" in error


def test_class_names_from_a_file(work: Path, call: Call) -> None:
    (work / "names.txt").write_text("Ameise\n Biene\nKuh \n", encoding="utf-8")
    assert call("import", "ours", "out", "--class-names", "names.txt")[0] == 0
    meta, state = load_model(work / "out")
    assert meta.class_names == ("Ameise", "Biene", "Kuh") and meta.loss == "sigmoid"
    assert torch.equal(state["head.weight"], load_model(work / "ours")[1]["head.weight"])


@pytest.mark.parametrize(
    ("known", "count", "some"), [("imagenet-1k", 1000, "goldfish"), ("imagenet-21k", 21843, "hen")]
)
def test_class_names_of_imagenet(work: Path, call: Call, known: str, count: int, some: str) -> None:
    assert call("import", "ours", "out", "--class-names", known, "--num-classes", str(count))[0] == 0
    meta = read_meta(work / "out")
    assert meta.num_classes == count and any(some in name for name in meta.class_names)
    if known == "imagenet-1k":
        assert meta.class_names[1].startswith("goldfish")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.npz", "out"), "nowhere.npz does not exist"),
        (("ours", "out", "--class-names", "nowhere.txt"), "--class-names: nowhere.txt cannot be read"),
        (("ours", "out", "--class-names", "gap.txt"), "--class-names: gap.txt has an empty line"),
        (("ours", "out", "--class-names", "two.txt", "--num-classes", "3"), "2 class names for --num-classes 3"),
        (
            ("ours", "out", "--class-names", "two.txt"),
            "2 names, but ours has 3 classes: give as many, or --num-classes 2",
        ),
        (("ours", "two.txt/out"), "two.txt/out cannot be written: "),
        (("ours", "out", "--num-classes", "0"), "--num-classes must be at least 1"),
        (("ours", "out", "--image-size", "9"), "image size 9 is not a multiple of the patch size 4: take 8 or 12"),
        (("weights.pth", "out", "--variant", "Q/16"), "Q/16"),
        (
            ("weights.pth", "out", "--variant", "B/16"),
            "give --width 32 --depth 1 --mlp-dim 128 --patch-size 4 and its --heads",
        ),
        (("weights.pth", "out", "--variant", "B/16", "--width", "32"), "give either variant or the sizes, not both"),
        (("weights.pth", "out", "--width", "32"), "depth, heads, patch_size must be given too"),
        (("weights.pth", "out", *SIZES, "--gelu", "relu"), "relu"),
        (("ours", "out", "--layer-norm-eps", "-1"), "--layer-norm-eps: Input should be greater than 0"),
        (("ours", "taken"), "OUT taken: it exists"),
        (("ours", "taken", "--force"), "taken exists and is not a saved model of shardvit"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_in_an_import(work: Path, call: Call, arguments: tuple[str, ...], message: str) -> None:
    (work / "gap.txt").write_text("a\n\nb\n")
    (work / "two.txt").write_text("a\nb\n")
    (work / "taken").mkdir()
    (work / "taken/thesis.txt").write_text("mine")
    code, _, error = call("import", *arguments)
    assert code == 2 and error.startswith("shardvit: ") and message in error
    assert not (work / "out").exists() and (work / "taken/thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("to", "name"), [("npz", "ours.npz"), ("timm", "ours-timm"), ("transformers", "ours-transformers")]
)
def test_an_export_is_named_after_the_model_and_can_be_imported_again(
    work: Path, call: Call, to: str, name: str
) -> None:
    code, output, _ = call("export", "ours", "--format", to)
    assert code == 0
    assert output.startswith("note: ")
    assert output.splitlines()[-1].startswith(f"{name}: ours as {to}: 8 px, 3 classes; ")
    assert call("import", name, "back")[0] == 0
    (meta, state), (first_meta, first) = load_model(work / "back"), load_model(work / "ours")
    assert meta == first_meta and all(torch.equal(state[key], first[key]) for key in first)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("runs/mine/finetune/model", "mine-finetune.npz"),
        ("runs/mine/swap_head/model", "mine-swap_head.npz"),
        ("models/vit.b16", "vit.b16.npz"),
    ],
)
def test_the_name_of_a_models_export_says_whose_it_is(work: Path, call: Call, folder: str, name: str) -> None:
    (work / folder).parent.mkdir(parents=True)
    (work / "ours").rename(work / folder)
    assert call("export", folder, "--format", "npz")[0] == 0
    assert (work / name).is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "--format", "npz"), "nowhere is not there"),
        (("ours",), "--format"),
        (("ours", "--format", "keras"), "keras"),
        (("ours", "--format", "npz", "--out", "model.bin"), "model.bin: the name of such a file must end in .npz"),
        (("ours", "--format", "npz", "--out", "mine.npz"), "mine.npz: it exists"),
    ],
)
def test_mistakes_in_an_export(work: Path, call: Call, arguments: tuple[str, ...], message: str) -> None:
    (work / "mine.npz").write_bytes(b"precious")
    before = sorted(work.iterdir())
    code, _, error = call("export", *arguments)
    assert code == 2 and error.startswith("shardvit: ") and message in error
    assert sorted(work.iterdir()) == before and (work / "mine.npz").read_bytes() == b"precious"
