"""`model.formats.detect`: whose a file is, what is around its tensors, and what cannot be read at all."""

import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardvit.model.config import ModelConfig
from shardvit.model.formats.detect import import_file, read_external
from shardvit.model.formats.export import export_model
from shardvit.model.formats.external_model import UserHints
from shardvit.model.saved.model_folder import save_model, write_side_record
from tests.model.formats.small_model import CONFIG, described, images, logits, random_model, rebuilt

SIZES = {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}


def test_a_state_dict_without_its_last_blocks_is_no_shallower_model(tmp_path: Path) -> None:
    state = random_model(described(ModelConfig(width=192, depth=2, heads=3, patch_size=4))).state_dict()
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"m.safetensors has 2 blocks where Ti has 12.*--depth 2"):
        read_external(tmp_path / "m.safetensors")
    assert read_external(tmp_path / "m.safetensors", hints=UserHints(depth=2)).config.sizes.depth == 2
    given = ModelConfig(width=192, depth=2, heads=3, patch_size=4)
    assert read_external(tmp_path / "m.safetensors", config=given).config.sizes == given.sizes


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    torch.save(random_model(described()).state_dict(), tmp_path / "m.pth")
    with zipfile.ZipFile(tmp_path / "m.pth", "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's own
        archive.writestr("m/data/0", archive.read("m/data/0"))
    with pytest.raises(ValueError, match=r"m.pth has the member 'm/data/0' 2 times"):
        read_external(tmp_path / "m.pth")


@pytest.mark.parametrize(
    ("num_classes", "said", "loss"),
    [
        (21843, None, "sigmoid"),
        (18291, None, "sigmoid"),
        (21843, "softmax", "softmax"),
        (1000, None, "softmax"),
        (1000, "sigmoid", "sigmoid"),
    ],
)
def test_the_loss_is_the_users_word_or_that_of_googles_data_sets(
    tmp_path: Path, num_classes: int, said: Any, loss: str
) -> None:
    """big_vision's configs vit_i21k.py, bit_i21k.py (21,843 classes) and vit_i1k.py; ViT's JFT-300M has 18,291."""
    meta = described(num_classes=num_classes, class_names=tuple(map(str, range(num_classes))))
    export_model(meta, random_model(meta).state_dict(), to="npz", out=tmp_path / "m.npz")
    (tmp_path / "m.npz.json").unlink()
    foreign = read_external(tmp_path / "m.npz", config=CONFIG, hints=UserHints(loss=said))
    assert foreign.loss == loss
    assert any(loss in note and "--loss" in note for note in foreign.notes) == (said is None)


@pytest.mark.parametrize(
    ("to", "name", "format"),
    [
        ("npz", "m.npz", "Google"),
        ("big_vision", "m.npz", "Google"),
        ("timm", "m", "shardvit"),
        ("transformers", "m", "transformers folder"),
        ("torchvision", "m.pth", "torchvision"),
        ("torch_export", "m.pt2", "torch.export"),
    ],
)
def test_every_export_is_recognised(tmp_path: Path, to: Any, name: str, format: str) -> None:
    meta = described()
    model = random_model(meta)
    export_model(meta, model.state_dict(), to=to, out=tmp_path / name)
    foreign = read_external(tmp_path / name)
    assert format in foreign.format
    found, state = import_file(tmp_path / name)
    assert found == meta
    moved = ("cls_token", "pos_embed") if to == "big_vision" else ()  # it has no position for the class token
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items() if name not in moved)
    torch.testing.assert_close(logits(rebuilt(found, state), images()), logits(model, images()), rtol=1e-5, atol=1e-5)

    asked = import_file(tmp_path / name, config=ModelConfig(**SIZES, gelu="erf"), image_size=32, num_classes=2)[0]
    assert (asked.model.gelu, asked.image_size, asked.num_classes) == ("erf", 32, 2)
    with pytest.raises(ValueError, match="4 attention heads, the model asked for has 8"):
        read_external(tmp_path / name, config=ModelConfig(**SIZES | {"heads": 8}))
    with pytest.raises(ValueError, match=r"does not fit(.*\n)*.*give --width 48 --depth 4"):
        import_file(tmp_path / name, config=ModelConfig(**SIZES | {"depth": 5, "patch_size": 5}))
    with pytest.raises(ValueError, match="holds a Vision Transformer, not a pure ResNet"):
        import_file(tmp_path / name, config=ModelConfig(variant="R50x1"))


def test_the_weights_of_a_folder_are_the_folder(tmp_path: Path) -> None:
    meta = described()
    save_model(tmp_path / "model", random_model(meta).state_dict(), meta=meta)
    assert import_file(tmp_path / "model" / "model.safetensors")[0] == meta


@pytest.mark.parametrize("position", ["learned_2d", "relative", "sincos_2d", "none"])
def test_other_positions_come_with_their_record(tmp_path: Path, position: Any) -> None:
    meta = described(ModelConfig(**SIZES, position=position))
    model = random_model(meta)
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match=r"no position embeddings .*, so its resolution .* are unknown"):
        read_external(tmp_path / "bare.safetensors", config=meta.model)
    write_side_record(tmp_path / "bare.safetensors", meta=meta)
    found, state = import_file(tmp_path / "bare.safetensors")
    assert found == meta
    assert torch.equal(logits(rebuilt(found, state), images()), logits(model, images()))


def test_a_masked_patch_model_is_a_trunk(tmp_path: Path) -> None:
    meta = described(head="masked_patch", num_classes=512, class_names=tuple(map(str, range(512))))
    model = random_model(meta)
    save_model(tmp_path / "model", model.state_dict(), meta=meta)
    with pytest.raises(ValueError, match="has no head: give --num-classes"):
        import_file(tmp_path / "model")
    found, state = import_file(tmp_path / "model", num_classes=2)
    assert (found.head, found.num_classes) == ("linear", 2)
    assert torch.equal(state["norm.weight"], model.state_dict()["norm.weight"])
    assert torch.equal(logits(rebuilt(found, state), images()), torch.zeros(3, 2))


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "model."])
def test_what_is_wrapped_around_a_state_dict_is_taken_off(tmp_path: Path, wrapper: str, prefix: str) -> None:
    state = random_model(described()).state_dict()
    content = {wrapper: {f"{prefix}{name}": value for name, value in state.items()}, "epoch": 3, "best": 0.5}
    torch.save(content, tmp_path / "checkpoint.pt")
    foreign = read_external(tmp_path / "checkpoint.pt", config=CONFIG)
    assert foreign.state.keys() == state.keys()
    assert all(torch.equal(foreign.state[name], value) for name, value in state.items())


def test_an_average_is_preferred(tmp_path: Path) -> None:
    state = random_model(described()).state_dict()
    average = {name: value + 1 for name, value in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": average}, tmp_path / "checkpoint.pt")
    foreign = read_external(tmp_path / "checkpoint.pt", config=CONFIG)
    assert torch.equal(foreign.state["norm.bias"], average["norm.bias"])


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


def test_no_pickle_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = random_model(described()).state_dict()
    torch.save({"state_dict": state, "args": _Malicious()}, tmp_path / "evil.pth")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(_Malicious()))
    for name in ("evil.pth", "plain.bin"):
        with pytest.raises(ValueError, match=rf"{name} holds more than tensors.* could run code"):
            read_external(tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_unreadable_things_are_refused_in_words(tmp_path: Path) -> None:
    def refused(path: Path, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            read_external(path)

    refused(tmp_path / "nothing.pth", "nothing.pth does not exist")
    (tmp_path / "photo.jpg").write_bytes(b"")
    refused(tmp_path / "photo.jpg", r"of no kind that can be imported: looked for a folder .* \.npz, \.pt2, \.safet")
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    refused(tmp_path / "cut.safetensors", "cannot be read as safetensors")
    (tmp_path / "cut.pth").write_bytes(b"PK\x03\x04")
    refused(tmp_path / "cut.pth", r"cut\.pth cannot be read as a file of torch")
    (tmp_path / "m.onnx").write_bytes(b"")
    refused(tmp_path / "m.onnx", "program without named weights")
    torch.save([1, 2], tmp_path / "list.pth")
    refused(tmp_path / "list.pth", "holds no state dict")
    torch.save({"weight": torch.zeros(1), "epoch": 3}, tmp_path / "mixed.pth")
    refused(tmp_path / "mixed.pth", "'epoch' is no tensor")
    save_file({"fc.weight": torch.zeros(1), "conv1.weight": torch.zeros(1)}, tmp_path / "resnet.safetensors")
    refused(tmp_path / "resnet.safetensors", r"tensors such as conv1\.weight, fc\.weight: looked for the names of timm")

    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", r"folder has no config\.json: looked for a model saved by shardvit, timm or")
    (tmp_path / "folder" / "config.json").write_text("{")
    refused(tmp_path / "folder", r"config\.json cannot be read")
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    refused(tmp_path / "folder", "it is 'bert'")
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    refused(tmp_path / "folder", r"has no weights: looked for model\.safetensors")


def test_positions_of_no_square_grid_are_refused(tmp_path: Path) -> None:
    state = random_model(described()).state_dict() | {"pos_embed": torch.zeros(1, 36, 48)}
    del state["cls_token"]
    state["pos_embed"] = torch.zeros(1, 35, 48)
    torch.save(state, tmp_path / "wide.pth")
    with pytest.raises(ValueError, match=r"35 patches are no square grid"):
        read_external(tmp_path / "wide.pth", config=ModelConfig(**SIZES, pool="gap"))
