"""`model.formats.transformers_state`: transformers' own ViT in, and out to what its Auto classes load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)

from shardvit.model.config import ModelConfig
from shardvit.model.formats.detect import import_file, read_external
from shardvit.model.formats.export import export_model
from tests.model.comparing import SMALL_TOKENS, randomise, relative_difference
from tests.model.formats.small_model import (
    NAMES,
    described,
    images,
    logits,
    random_model,
    rebuilt,
)


def _config(**changes: Any) -> ViTConfig:
    return ViTConfig(
        **{
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 80,
            "image_size": 24,
            "patch_size": 4,
            "num_labels": 5,
            **changes,
        }
    )


def _random(model: torch.nn.Module) -> Any:
    return randomise(model, token_scale=SMALL_TOKENS).eval()


@pytest.mark.parametrize(
    ("changes", "gelu", "epsilon"),
    [
        ({}, "erf", 1e-12),
        ({"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}, "tanh", 1e-6),
        ({"hidden_act": "gelu_new"}, "tanh", 1e-12),
        ({"qkv_bias": False}, "erf", 1e-12),
    ],
)
def test_a_folder_of_transformers_gives_its_logits(
    tmp_path: Path, changes: dict[str, Any], gelu: str, epsilon: float
) -> None:
    theirs = _random(ViTForImageClassification(_config(**changes, id2label=dict(enumerate(NAMES)))))
    theirs.save_pretrained(tmp_path / "theirs")
    meta, state = import_file(tmp_path / "theirs")
    assert (meta.model.gelu, meta.model.layer_norm_eps, meta.model.interpolation) == (gelu, epsilon, "timm")
    assert (meta.model.sizes.heads, meta.class_names) == (4, NAMES)
    assert relative_difference(logits(rebuilt(meta, state), images()), logits(theirs, images())) < 1e-5


def test_names_inside_version_5_are_read_too(tmp_path: Path) -> None:
    theirs = _random(ViTForImageClassification(_config()))
    assert "vit.layers.0.attention.q_proj.weight" in theirs.state_dict()
    torch.save(theirs.state_dict(), tmp_path / "bare.bin")
    with pytest.raises(ValueError, match="--heads"):
        read_external(tmp_path / "bare.bin")
    meta, state = import_file(tmp_path / "bare.bin", config=ModelConfig(**_sizes()))
    assert meta.model.layer_norm_eps == 1e-12
    assert relative_difference(logits(rebuilt(meta, state), images()), logits(theirs, images())) < 1e-5


def _sizes() -> dict[str, int]:
    return {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}


@pytest.mark.parametrize("kind", [ViTModel, ViTForMaskedImageModeling])
def test_a_trunk_without_a_head_gets_one_on_request(tmp_path: Path, kind: Any) -> None:
    theirs = _random(kind(_config(encoder_stride=4)))
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="has no head: give --num-classes"):
        import_file(tmp_path / "theirs")
    assert any(
        "left out, classification does not use them" in note for note in read_external(tmp_path / "theirs").notes
    )
    meta, state = import_file(tmp_path / "theirs", num_classes=3)
    assert meta.class_names == ("0", "1", "2")
    ours = rebuilt(meta, state)
    trunk = theirs if kind is ViTModel else theirs.vit
    with torch.no_grad():
        tokens = trunk(images()).last_hidden_state
        assert relative_difference(ours.forward_features(images()), tokens) < 1e-5
        assert torch.equal(ours(images()), torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"num_channels": 1}, "num_channels 1"),
        ({"image_size": [24, 48]}, r"image_size \[24, 48\]; .* square images only"),
        ({"patch_size": [4, 8]}, r"patch_size \[4, 8\]"),
        ({"model_type": "beit"}, "it is 'beit'"),
        ({"num_attention_heads": 7}, "heads 7 must divide width 48"),
    ],
)
def test_other_models_are_refused_in_words(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    _random(ViTForImageClassification(_config())).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=says):
        read_external(tmp_path / "theirs")


def test_missing_tensors_are_tabled_and_nothing_is_loaded(tmp_path: Path) -> None:
    state = _random(ViTForImageClassification(_config())).state_dict()
    del state["vit.layers.2.attention.k_proj.weight"]
    torch.save(state, tmp_path / "bare.bin")
    with pytest.raises(ValueError, match=r"blocks\.2\.attn\.qkv\.weight +missing +\(144, 48\)"):
        import_file(tmp_path / "bare.bin", config=ModelConfig(**_sizes()))


@pytest.mark.parametrize(
    "more",
    [{}, {"gelu": "erf"}, {"layer_norm_eps": 1e-3}, {"class_token_position": "none"}],
)
def test_an_export_gives_our_logits_in_transformers(tmp_path: Path, more: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(_sizes() | more)
    meta = described(config, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    model = random_model(meta)
    export_model(meta, model.state_dict(), to="transformers", out=tmp_path / "out")
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert isinstance(theirs, ViTForImageClassification)
    assert theirs.config.id2label == dict(enumerate(NAMES))
    assert theirs.config.label2id == {name: index for index, name in enumerate(NAMES)}
    assert relative_difference(logits(theirs, images()), logits(model, images())) < 1e-5
    again, state = import_file(tmp_path / "out")
    assert again == meta
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("protocol", "share"), [("vit", None), ("timm", None), ("timm", 0.8), ("big_vision", 0.7)])
def test_an_export_prepares_pixels_as_recorded(tmp_path: Path, protocol: Any, share: float | None) -> None:
    meta = described(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), eval_protocol=protocol, eval_crop_share=share)
    export_model(meta, random_model(meta).state_dict(), to="transformers", out=tmp_path / "out")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    picture = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    pixels = processor(Image.fromarray(picture), return_tensors="pt")["pixel_values"][0]
    assert pixels.shape == (3, 24, 24)
    if protocol == "vit":
        resized = Image.fromarray(picture).resize((24, 24), Image.Resampling.BILINEAR)
    else:
        edge = {None: 26, 0.8: 30, 0.7: 34}[share]  # floor(24 / 0.9), floor(24 / 0.8), round(24 / 0.7)
        kernel = Image.Resampling.BICUBIC if protocol == "timm" else Image.Resampling.BILINEAR
        scaled = Image.fromarray(picture).resize((edge * 60 // 40, edge), kernel)
        left, top = (scaled.width - 24) // 2, (edge - 24) // 2
        resized = scaled.crop((left, top, left + 24, top + 24))
    expected = torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255
    expected = (expected - torch.tensor(meta.mean)[:, None, None]) / torch.tensor(meta.std)[:, None, None]
    # two libraries' resizing: a level or two of 255, over a deviation of 0.2
    assert (pixels - expected).abs().max() < 3 / 255 / 0.2

    assert import_file(tmp_path / "out")[0] == meta
    (tmp_path / "out" / "model.safetensors.json").unlink()
    found = import_file(tmp_path / "out")[0]
    assert (found.mean, found.std, found.eval_protocol) == (meta.mean, meta.std, protocol)
    if share is not None:
        edges = {"timm": int, "big_vision": round}[protocol]
        assert edges(24 / found.eval_crop_share) == edges(24 / share)


def test_without_a_preprocessor_pixels_are_googles(tmp_path: Path) -> None:
    meta = described(mean=(0.4, 0.5, 0.6))
    export_model(meta, random_model(meta).state_dict(), to="transformers", out=tmp_path / "out")
    (tmp_path / "out" / "preprocessor_config.json").unlink()
    foreign = read_external(tmp_path / "out")
    assert foreign.mean == (0.5, 0.5, 0.5)
    assert any("preprocessor_config.json is missing" in note for note in foreign.notes)


@pytest.mark.parametrize(
    ("mean", "expected"), [(0.3, (0.3, 0.3, 0.3)), ([0.1, 0.2, 0.3], (0.1, 0.2, 0.3)), ([0.1], None)]
)
def test_means_of_a_preprocessor(tmp_path: Path, mean: Any, expected: Any) -> None:
    meta = described()
    export_model(meta, random_model(meta).state_dict(), to="transformers", out=tmp_path / "out")
    path = tmp_path / "out" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": mean}))
    if expected is None:
        with pytest.raises(ValueError, match=r"transformers folder says what cannot be: mean"):
            import_file(tmp_path / "out")
    else:
        assert import_file(tmp_path / "out")[0].mean == expected


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    theirs = _random(ViTForImageClassification(_config()))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    meta, state = import_file(tmp_path / "theirs")
    assert relative_difference(logits(rebuilt(meta, state), images()), logits(theirs, images())) < 1e-5
