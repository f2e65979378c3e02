"""`model.saved.model_folder`: what is saved comes back, timm reads it too, and broken folders are refused in words."""

import json
from pathlib import Path

import pytest
import timm
import torch
from pydantic import ValidationError
from safetensors import safe_open

from model.config import ModelConfig
from model.saved.model_folder import SavedModelMeta, build_from_saved, load_model, read_meta, save_model
from model.vit import build_model
from model.vocabulary import HeadKind
from tests.model.comparing import randomise

CONFIG = ModelConfig(width=48, depth=2, heads=4, mlp_dim=80, patch_size=4)


def _meta(head: HeadKind = "linear", num_classes: int = 5) -> SavedModelMeta:
    names = tuple(f"class {i} \N{LATIN SMALL LETTER E WITH ACUTE}" for i in range(num_classes))
    return SavedModelMeta(model=CONFIG, image_size=16, num_classes=num_classes, class_names=names, head=head)


def _random_model(meta: SavedModelMeta) -> torch.nn.Module:
    model = build_model(meta.model, image_size=meta.image_size, num_classes=meta.num_classes, head=meta.head)
    return randomise(model).eval()


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_what_is_saved_comes_back(tmp_path: Path, head: HeadKind) -> None:
    meta = _meta(head)
    model = _random_model(meta)
    save_model(tmp_path / "model", model.state_dict(), meta=meta)

    assert read_meta(tmp_path / "model") == meta
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    loaded_meta, state_dict = load_model(tmp_path / "model")
    assert loaded_meta == meta
    assert state_dict.keys() == model.state_dict().keys()
    assert all(torch.equal(state_dict[name], value) for name, value in model.state_dict().items())
    _, rebuilt = build_from_saved(tmp_path / "model")
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(images), model(images))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_timm_reads_a_class_token_without_position(tmp_path: Path) -> None:
    meta = _meta()
    meta = meta.model_copy(update={"model": meta.model.model_copy(update={"class_token_position": "none"})})
    model = _random_model(meta)
    save_model(tmp_path / "model", model.state_dict(), meta=meta)
    assert read_meta(tmp_path / "model") == meta
    theirs = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    assert theirs.pos_embed.shape[1] == meta.model.grid_size(meta.image_size) ** 2
    images = torch.randn(2, 3, meta.image_size, meta.image_size)
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images))  # patches: a product here, a convolution there


def test_timm_refuses_an_mlp_head(tmp_path: Path) -> None:
    """timm has no such head; without its keys in config.json it stops instead of loading a trunk alone."""
    meta = _meta("mlp")
    save_model(tmp_path / "model", _random_model(meta).state_dict(), meta=meta)
    with pytest.raises(KeyError, match="architecture"):
        timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)


def test_dtypes_survive_and_views_are_saved_whole(tmp_path: Path) -> None:
    meta = _meta()
    state_dict = {name: value.to(torch.bfloat16) for name, value in _random_model(meta).state_dict().items()}
    state_dict["head.weight"] = state_dict["head.weight"].T.contiguous().T  # not contiguous any more
    save_model(tmp_path / "model", state_dict, meta=meta)
    _, loaded = load_model(tmp_path / "model")
    assert all(loaded[name].dtype == torch.bfloat16 for name in loaded)
    assert all(torch.equal(loaded[name], value) for name, value in state_dict.items())
    _, model = build_from_saved(tmp_path / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_saving_again_replaces_the_earlier_result_and_clears_leftovers(tmp_path: Path) -> None:
    for leftover in (".model.writing", ".model.replaced"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "half").write_text("killed here")
    meta = _meta()
    state_dict = _random_model(meta).state_dict()
    save_model(tmp_path / "model", state_dict, meta=meta)
    state_dict["head.bias"] = torch.full((5,), 3.0)
    save_model(tmp_path / "model", state_dict, meta=meta)
    assert torch.equal(load_model(tmp_path / "model")[1]["head.bias"], torch.full((5,), 3.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_failing_write_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = _meta()
    state_dict = _random_model(meta).state_dict()
    save_model(tmp_path / "model", state_dict, meta=meta)

    def full_disk(*_args: object, **_kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_model(tmp_path / "model", {**state_dict, "head.bias": torch.ones(5)}, meta=meta)
    assert torch.equal(load_model(tmp_path / "model")[1]["head.bias"], state_dict["head.bias"])


def test_something_else_at_that_place_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "thesis.tex").write_text("three years of work")
    meta = _meta()
    with pytest.raises(ValueError, match=r"model exists and is not a saved model of shardvit"):
        save_model(folder, _random_model(meta).state_dict(), meta=meta)
    assert (folder / "thesis.tex").read_text() == "three years of work"


def test_weights_of_another_model_are_not_saved(tmp_path: Path) -> None:
    state_dict = _random_model(_meta("mlp")).state_dict()
    with pytest.raises(ValueError, match=r"does not fit .*: 'head.bias' is missing"):
        save_model(tmp_path / "model", state_dict, meta=_meta("linear"))
    state_dict = _random_model(_meta(num_classes=4)).state_dict()
    with pytest.raises(ValueError, match=r"'head.bias' has the shape \(4,\) instead of \(5,\)"):
        save_model(tmp_path / "model", state_dict, meta=_meta())
    assert not any(tmp_path.iterdir())


def test_broken_folders_are_refused_in_words(tmp_path: Path) -> None:
    meta = _meta()
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match=r"model/config\.json is missing"):
        load_model(folder)
    save_model(folder, _random_model(meta).state_dict(), meta=meta)
    weights, config = folder / "model.safetensors", folder / "config.json"
    good_weights, good_config = weights.read_bytes(), config.read_text()

    weights.write_bytes(good_weights[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        load_model(folder)
    weights.write_bytes(good_weights)

    config.write_text(good_config[:50])
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        load_model(folder)
    for content, problem in (("[]", "is not a JSON object"), ("{}", "has no key 'shardvit'")):
        config.write_text(content)
        with pytest.raises(ValueError, match=rf"config\.json {problem}"):
            load_model(folder)
    content = json.loads(good_config)
    content["shardvit"]["model"]["gelu"] = "relu"
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"config\.json: shardvit\.model\.gelu: Input should be 'tanh' or 'erf'"):
        load_model(folder)
    content = json.loads(good_config)
    content["shardvit"]["image_size"] = 24
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit .*'pos_embed' has the shape"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"class_names": ("a",)}, "1 class_names for num_classes 5"),
        ({"image_size": 18}, "image size 18 is not a multiple of the patch size 4"),
        ({"gelu": "erf"}, "gelu\n.*Extra inputs"),
    ],
)
def test_records_that_contradict_themselves_are_refused(changed: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SavedModelMeta.model_validate({**_meta().model_dump(exclude_none=True), **changed})
