"""`model.formats.export`: what is written where, what is refused, and what is never overwritten."""

import os
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageClassification

from shardvit.model.config import ModelConfig
from shardvit.model.formats.detect import import_file
from shardvit.model.formats.export import ExportFormat, export_model, export_objection, formats_of, save_for_others
from shardvit.model.saved.model_folder import SavedModelMeta, load_model
from tests.model.comparing import relative_difference
from tests.model.formats.small_model import (
    CONFIG,
    described,
    images,
    logits,
    random_model,
)

SIZES = {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}
OUT = {
    "npz": "m.npz",
    "big_vision": "m.npz",
    "timm": "m",
    "transformers": "m",
    "torchvision": "m.pth",
    "onnx": "m.onnx",
    "torch_export": "m.pt2",
}
FORMATS = get_args(ExportFormat)


def loaded_by_others(folder: Path, meta: SavedModelMeta) -> dict[str, nn.Module]:
    """By the two lines that README has for a model's folder."""
    epsilon = {} if meta.model.layer_norm_eps == 1e-6 else {"norm_layer": partial(nn.LayerNorm, eps=1e-12)}
    return {
        "timm": timm.create_model(f"local-dir:{folder}", pretrained=True, **epsilon).eval(),
        "transformers": AutoModelForImageClassification.from_pretrained(folder).eval(),
    }


@pytest.mark.parametrize(
    "keys",
    [
        {"position": "sincos_2d"},
        {"position": "sincos_2d", "pool": "gap"},
        {"position": "none", "pool": "map"},
        {"layer_norm_eps": 1e-12, "gelu": "erf"},
        {"layer_norm_eps": 1e-12, "position": "sincos_2d"},
    ],
    ids=lambda keys: " ".join(map(str, keys.values())),
)
def test_a_models_folder_loads_in_timm_and_transformers_as_it_is(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Tokens are small, so that the epsilon matters."""
    meta = described(ModelConfig(**SIZES, **keys))
    model = random_model(meta)
    save_for_others(tmp_path / "m", model.state_dict(), meta=meta)
    expected = logits(model, images())
    for theirs in loaded_by_others(tmp_path / "m", meta).values():
        assert relative_difference(logits(theirs, images()), expected) < 1e-5
    found, state = load_model(tmp_path / "m")
    assert found == meta and state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_another_epsilon_is_never_taken_for_timms(tmp_path: Path, pool: Any) -> None:
    """Its error names the argument; transformers loads such a model through timm if its own ViT has no such pooling."""
    meta = described(ModelConfig(**SIZES, layer_norm_eps=1e-12, pool=pool))
    model = random_model(meta)
    save_for_others(tmp_path / "m", model.state_dict(), meta=meta)
    wrong = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True, norm_layer="layernorm").eval()
    assert relative_difference(logits(wrong, images()), logits(model, images())) > 5e-5
    with pytest.raises(KeyError, match="eps=1e-12"):
        timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True)
    if pool == "gap":
        with pytest.raises(KeyError, match="eps=1e-12"):
            AutoModelForImageClassification.from_pretrained(tmp_path / "m")
    notes = export_model(meta, model.state_dict(), to="timm", out=tmp_path / "timm")
    assert "norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-12)" in notes[0]


@pytest.mark.parametrize("to", ["npz", "timm", "transformers", "torchvision"])
def test_fixed_positions_travel_along(tmp_path: Path, to: ExportFormat) -> None:
    meta = described(ModelConfig(**SIZES, position="sincos_2d"))
    state = random_model(meta).state_dict()
    export_model(meta, state, to=to, out=tmp_path / OUT[to])
    found, back = import_file(tmp_path / OUT[to])
    assert found == meta and back.keys() == state.keys()


def test_positions_that_somebody_trained_are_not_taken_for_the_fixed_ones(tmp_path: Path) -> None:
    meta = described(ModelConfig(**SIZES, position="sincos_2d"))
    save_for_others(tmp_path / "m", random_model(meta).state_dict(), meta=meta)
    tensors = load_file(tmp_path / "m/model.safetensors")
    save_file(tensors | {"pos_embed": tensors["pos_embed"] + 0.01}, tmp_path / "m/model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit .*pos_embed"):
        load_model(tmp_path / "m")


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    meta = described()
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="mine exists"):
        export_model(meta, random_model(meta).state_dict(), to="transformers", out=tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine" and os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("to", [to for to in FORMATS if to != "onnx"])
def test_an_earlier_export_is_replaced(tmp_path: Path, to: ExportFormat) -> None:
    meta = described()
    state = random_model(meta).state_dict()
    out = tmp_path / OUT[to]
    export_model(meta, state, to=to, out=out)
    names = sorted(os.listdir(tmp_path))
    export_model(meta, state | {"head.bias": torch.ones(5)}, to=to, out=out)
    assert sorted(os.listdir(tmp_path)) == names
    assert torch.equal(import_file(out)[1]["head.bias"], torch.ones(5))


@pytest.mark.parametrize("to", [to for to in FORMATS if to != "onnx"])
@pytest.mark.parametrize(
    "changes",
    [
        {
            "config": ModelConfig(**SIZES, interpolation="timm"),
            "mean": (0.1, 0.2, 0.3),
            "std": (0.4, 0.5, 0.6),
            "loss": "sigmoid",
            "eval_protocol": "big_vision",
            "eval_crop_share": 0.8,
        },
        {"eval_protocol": "timm", "eval_crop_share": 0.9},
        {"config": ModelConfig(**SIZES, gelu="erf")},
    ],
    ids=["interpolation, pixels, loss, crop", "another crop", "erf"],
)
def test_what_the_weights_were_trained_with_travels_along(
    tmp_path: Path, to: ExportFormat, changes: dict[str, Any]
) -> None:
    meta = described(**changes)
    if export_objection(meta, to=to):
        pytest.skip("Google's GELU is tanh")
    export_model(meta, random_model(meta).state_dict(), to=to, out=tmp_path / OUT[to])
    assert import_file(tmp_path / OUT[to])[0] == meta


@pytest.mark.parametrize("to", FORMATS)
def test_a_folder_with_something_else_stays(tmp_path: Path, to: ExportFormat) -> None:
    meta = described()
    out = tmp_path / OUT[to]
    out.mkdir()
    (out / "thesis.tex").write_text("three years of work")
    with pytest.raises((ValueError, OSError)):
        export_model(meta, random_model(meta).state_dict(), to=to, out=out)
    assert (out / "thesis.tex").read_text() == "three years of work"


@pytest.mark.parametrize(("first", "second"), [("timm", "transformers"), ("transformers", "timm")])
def test_an_export_of_another_kind_stays(tmp_path: Path, first: ExportFormat, second: ExportFormat) -> None:
    meta = described()
    state = random_model(meta).state_dict()
    export_model(meta, state, to=first, out=tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    with pytest.raises(ValueError, match="exists and is n"):
        export_model(meta, state, to=second, out=tmp_path / "m")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}


def test_a_programs_notes_say_how_to_normalise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, written = described(mean=(0.1, 0.2, 0.3)), list[Path]()
    monkeypatch.setattr("shardvit.model.formats.programs.write_onnx", lambda path, *_, **__: written.append(path))
    (tmp_path / "m.onnx").write_text("an earlier one")
    (note,) = export_model(meta, random_model(meta).state_dict(), to="onnx", out=tmp_path / "m.onnx")
    assert written == [tmp_path / "m.onnx"] and "(x - (0.1, 0.2, 0.3)) / (0.5, 0.5, 0.5)" in note


@pytest.mark.parametrize(
    ("formats", "config", "head", "says"),
    [
        (["timm", "transformers"], CONFIG, "mlp", "its head is mlp"),
        (["npz", "big_vision"], ModelConfig(**SIZES, gelu="erf"), "linear", "GELU"),
        (
            ["npz", "big_vision", "transformers", "torchvision"],
            ModelConfig(**SIZES, layer_scale=0.1),
            "linear",
            "scale",
        ),
        (["transformers", "torchvision"], ModelConfig(**SIZES, pool="gap"), "linear", "no pooling gap"),
        (
            ["transformers", "torchvision"],
            ModelConfig(**SIZES, position="learned_2d"),
            "linear",
            "learned_2d",
        ),
        (["timm", "torchvision"], ModelConfig(**SIZES, resnet_layers=()), "linear", "ResNet"),
        (list(FORMATS), CONFIG, "masked_patch", "fine-tune it first"),
        (list(FORMATS[:5]), ModelConfig(**SIZES, position="relative"), "linear", "relative"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    tmp_path: Path, formats: list[ExportFormat], config: ModelConfig, head: str, says: str
) -> None:
    meta = described(config, head=head)
    held, refused = formats_of(meta)
    assert held == [to for to in FORMATS if to not in refused] and not set(formats) & set(held)
    for to in formats:
        assert says in refused[to]
        with pytest.raises(ValueError, match=f"^{to} cannot hold this model: .*{says}"):
            export_model(meta, {}, to=to, out=tmp_path / OUT[to])
    assert not any(tmp_path.iterdir())


def test_wrong_weights_names_and_formats_are_refused(tmp_path: Path) -> None:
    meta = described()
    state = random_model(meta).state_dict()
    with pytest.raises(ValueError, match=r"the weights do not fit .*\n(.*\n)*  head\.bias +missing +\(5,\)"):
        export_model(meta, {k: v for k, v in state.items() if k != "head.bias"}, to="npz", out=tmp_path / "m.npz")
    for to in ("npz", "torchvision", "onnx", "torch_export"):
        with pytest.raises(ValueError, match="the name of such a file must end in"):
            export_model(meta, state, to=to, out=tmp_path / "m.weights")
    with pytest.raises(ValueError, match="no format 'keras': take one of npz, big_vision, timm"):
        export_model(meta, state, to="keras", out=tmp_path / "m")  # pyright: ignore[reportArgumentType]
    assert not any(tmp_path.iterdir())


def test_doubled_class_names_are_told(tmp_path: Path) -> None:
    meta = described(class_names=("crane", "crane", "a", "b", "c"))
    notes = export_model(meta, random_model(meta).state_dict(), to="transformers", out=tmp_path / "m")
    assert any("label2id keeps one class only" in note and "crane" in note for note in notes)
