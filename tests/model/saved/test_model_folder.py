"""A saved model's folder, and what the shapes of a state dict tell when it does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from pydantic import ValidationError
from safetensors import safe_open

from shardvit.model.config import ModelConfig
from shardvit.model.own.allowed import ALLOWED
from shardvit.model.saved.model_folder import (
    SavedModelMeta,
    build_from_saved,
    expected_shapes,
    load_model,
    read_meta,
    save_model,
)
from shardvit.model.saved.state_shapes import Shape, describe_differences
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import HeadKind
from tests.model.comparing import randomise
from tests.model.formats.small_model import described

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


def test_parameters_of_an_own_model_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are in timm."""

    def build(*, image_size: int, num_classes: int) -> torch.nn.Module:
        parts = {"head": torch.nn.Linear(3, num_classes), "head_dist": torch.nn.Linear(3, num_classes)}
        return torch.nn.ModuleDict(parts)

    monkeypatch.setitem(ALLOWED, "0" * 64, lambda name: build)
    own = ModelConfig.model_validate({"custom": f"/elsewhere.py@{'0' * 64}:build"})
    meta = _meta().model_copy(update={"model": own})
    state = randomise(build(image_size=16, num_classes=5)).state_dict()
    save_model(tmp_path / "model", state, meta=meta)
    assert load_model(tmp_path / "model")[1].keys() == state.keys()


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


SIZES = {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}


def _shapes(changes: dict[str, Any] | None = None, **record: Any) -> dict[str, Shape]:
    return expected_shapes(described(ModelConfig(**{**SIZES, **(changes or {})}), **record))


def _fix(found: dict[str, Shape], expected: dict[str, Shape]) -> list[str]:
    """The sentences below the table."""
    return [line for line in describe_differences(found, expected).splitlines() if not line.startswith("  ")]


def test_nothing_is_said_of_equal_models() -> None:
    assert describe_differences(_shapes(), _shapes()) == ""


def test_the_table_has_names_and_both_shapes() -> None:
    found, expected = _shapes(), _shapes()
    del found["blocks.2.norm1.weight"]
    found["blocks.10.norm1.weight"] = (48,)
    found["norm.bias"] = (47,)
    assert describe_differences(found, expected).splitlines()[:-1] == [
        "  name                    in the file  in the model",
        "  blocks.2.norm1.weight   missing      (48,)",
        "  blocks.10.norm1.weight  (48,)        missing",
        "  norm.bias               (47,)        (48,)",
    ]


def test_long_tables_are_cut() -> None:
    found = {f"a.{index}": (1,) for index in range(30)}
    lines = describe_differences(found, {}).splitlines()
    assert len([line for line in lines if "(1,)" in line]) == 20
    assert "  and 10 more" in lines
    assert lines[-1].startswith("No name is one of this model's")


@pytest.mark.parametrize(
    ("found", "expected", "says"),
    [
        (
            _shapes(num_classes=2, class_names=("a", "b")),
            _shapes(),
            "The file has 2 classes, the model 5: give --num-classes 2",
        ),
        (_shapes(head="mlp"), _shapes(), "The file's head is mlp, the model's is linear"),
        (_shapes(image_size=32), _shapes(), "on images of 32 pixels (8 x 8 patches), the model is for 24"),
        (_shapes({"depth": 3}), _shapes(), "give --width 48 --depth 3 --mlp-dim 80 --patch-size 4"),
        (_shapes({"pool": "gap"}), _shapes(), "The file pools by gap, the model by cls: give pool gap"),
        (_shapes({"pool": "map"}), _shapes({"pool": "gap"}), "The file pools by map, the model by gap"),
        (_shapes({"layer_scale": 0.1}), _shapes(), "the model has none: give layer_scale"),
        (_shapes(), _shapes({"layer_scale": 0.1}), "the file has none: leave it out"),
        (_shapes(), _shapes({"position": "none"}), "are in one of the two only: give the other's position"),
    ],
)
def test_one_cause_is_one_sentence(found: dict[str, Shape], expected: dict[str, Shape], says: str) -> None:
    (sentence,) = _fix(found, expected)
    assert says in sentence


def test_several_causes_are_all_said() -> None:
    sentences = _fix(_shapes(num_classes=1, class_names=("a",), image_size=32), _shapes())
    assert [sentence.split(",")[0] for sentence in sentences] == [
        "The file was trained on images of 32 pixels (8 x 8 patches)",
        "The file has 1 classes",
    ]


@pytest.mark.parametrize("variant", ["Ti/16", "L/16", "B/32", "H/14", "R50+B/16", "R26+S/32"])
def test_a_known_variant_is_named(variant: str) -> None:
    image_size = 28 if variant == "H/14" else 64
    found = expected_shapes(described(ModelConfig(variant=variant), image_size=image_size))
    expected = expected_shapes(described(ModelConfig(variant="B/16"), image_size=64))
    assert f"The file holds a {variant}: give --variant {variant}." in _fix(found, expected)


def test_a_headless_file_gets_a_head_on_request() -> None:
    found = {name: shape for name, shape in _shapes().items() if not name.startswith("head.")}
    assert _fix(found, _shapes()) == ["The file has no head: import with --num-classes 5 to attach a zero one."]


def test_a_hole_in_a_file_is_no_other_model() -> None:
    found = _shapes()
    del found["blocks.1.mlp.fc2.bias"]
    (sentence,) = _fix(found, _shapes())
    assert "missing: 1; that do not belong to the model: 0;" in sentence
    assert "Sizes, resolution and classes are the same" in sentence
    del found["norm.weight"]
    (sentence,) = _fix(found, _shapes())
    assert sentence == "The file has no tensor for our norm.weight: it is incomplete, or no Vision Transformer."


def test_of_a_resnet_only_the_numbers_are_said() -> None:
    resnet = expected_shapes(described(ModelConfig(resnet_layers=(1, 1)), image_size=32))
    found = {name: shape for name, shape in resnet.items() if name != "head.bias"}
    assert _fix(found, resnet)[0].startswith("Tensors that are missing: 1; that do not belong to the model: 0;")


def test_a_grid_that_is_not_square_is_said() -> None:
    found = _shapes() | {"pos_embed": (1, 1 + 34, 48)}
    assert "34 patches are no square grid" in _fix(found, _shapes())[0]
