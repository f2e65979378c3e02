"""`model.formats.timm_state`: what timm wrote gives timm's logits here; what we would compute otherwise is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn
from transformers import AutoModelForImageClassification

from shardvit.model.config import ModelConfig
from shardvit.model.formats.detect import import_file, read_external
from shardvit.model.saved.model_folder import save_model
from tests.model.comparing import SMALL_TOKENS, randomise, relative_difference
from tests.model.formats.small_model import described, images, logits, random_model, rebuilt

SIZES = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 4, "num_heads": 4, "mlp_ratio": 2.0}


def _timm_model(architecture: str = "vit_base_patch16_224", **arguments: Any) -> nn.Module:
    """Random weights everywhere, a head of five classes."""
    model = timm.create_model(architecture, **{"num_classes": 5, **SIZES, **arguments}).eval()
    return randomise(model, token_scale=SMALL_TOKENS)


def _saved(model: nn.Module, folder: Path, **arguments: Any) -> Path:
    save_for_hf(model, folder, model_args={**SIZES, **arguments}, safe_serialization=True)
    return folder


@pytest.mark.parametrize(
    ("architecture", "arguments", "gelu", "pool"),
    [
        ("vit_base_patch16_224", {}, "erf", "cls"),
        ("vit_base_patch16_224", {"act_layer": "gelu_tanh"}, "tanh", "cls"),
        ("vit_base_patch16_224", {"init_values": 0.1}, "erf", "cls"),
        ("vit_base_patch16_224", {"qkv_bias": False}, "erf", "cls"),
        ("deit3_base_patch16_224", {}, "erf", "cls"),  # no position for the class token, layer scale
        ("vit_base_patch16_gap_224", {}, "erf", "gap"),
        ("vit_base_patch16_siglip_224", {}, "erf", "map"),
        ("vit_base_patch32_siglip_256", {}, "tanh", "map"),
        ("vit_base_patch16_clip_224", {"pre_norm": False}, "erf", "cls"),  # epsilon 1e-5
    ],
)
def test_a_folder_of_timm_gives_its_logits(
    tmp_path: Path, architecture: str, arguments: dict[str, Any], gelu: str, pool: str
) -> None:
    model = _timm_model(architecture, **arguments)
    meta, state = import_file(_saved(model, tmp_path / "theirs", **arguments))
    assert (meta.model.gelu, meta.model.pool, meta.model.interpolation) == (gelu, pool, "timm")
    assert (meta.model.sizes.heads, meta.image_size, meta.num_classes) == (4, 24, 5)
    expected = logits(model, images())
    assert relative_difference(logits(rebuilt(meta, state), images()), expected) < 1e-5


@pytest.mark.parametrize("without_position", [False, True])
def test_as_many_positions_as_another_grid_has_patches(tmp_path: Path, without_position: bool) -> None:
    """8 x 8 patches, a class token and 16 registers are 9 x 9."""
    more = {"img_size": 32, "reg_tokens": 16, "no_embed_class": without_position}
    model = _timm_model(**more)
    meta, state = import_file(_saved(model, tmp_path / "theirs", **more))
    assert (meta.image_size, meta.model.class_token_position) == (32, "none" if without_position else "learned")
    assert relative_difference(logits(rebuilt(meta, state), images(32)), logits(model, images(32))) < 1e-5


def test_what_model_args_say_is_null_is_none_as_for_timm(tmp_path: Path) -> None:
    """The architecture has layer scale of its own."""
    model = timm.create_model("vit_small_patch16_rope_224", num_classes=5, **SIZES)
    assert hasattr(model.blocks[0], "gamma_1") and model.blocks[0].gamma_1 is not None
    config = ModelConfig(width=48, depth=4, heads=4, patch_size=4, rope="axial", gelu="erf", channels=2)
    meta = described(config, mean=(0.5, 0.5), std=(0.5, 0.5))
    ours = random_model(meta)
    save_model(tmp_path, ours.state_dict(), meta=meta)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["model_args"]["init_values"] is None and content.pop("shardvit")
    (tmp_path / "config.json").write_text(json.dumps(content))
    found, state = import_file(tmp_path)
    assert found.model.layer_scale is None and found.model.channels == 2
    pixels = images()[:, :2]
    assert relative_difference(logits(rebuilt(found, state), pixels), logits(ours, pixels)) < 1e-5


def test_what_a_folder_says_of_pixels_and_classes(tmp_path: Path) -> None:
    folder = _saved(_timm_model(), tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    config["label_names"] = ["a", "b", "c", "d", "e"]
    config["pretrained_cfg"] |= {"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3], "interpolation": "bicubic", "crop_pct": 0.8}
    config["pretrained_cfg"]["crop_mode"] = "center"
    (folder / "config.json").write_text(json.dumps(config))
    meta, _ = import_file(folder)
    assert meta.class_names == ("a", "b", "c", "d", "e")
    assert (meta.mean, meta.std) == ((0.1, 0.2, 0.3), (1, 2, 3))
    assert (meta.eval_protocol, meta.eval_crop_share) == ("timm", 0.8)

    config["pretrained_cfg"] |= {"interpolation": "bilinear", "crop_mode": "squash", "crop_pct": 1.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert import_file(folder)[0].eval_protocol == "vit"
    config["pretrained_cfg"] |= {"interpolation": "bilinear", "crop_mode": "center", "crop_pct": 0.875}
    (folder / "config.json").write_text(json.dumps(config))
    meta, _ = import_file(folder)
    assert (meta.eval_protocol, meta.eval_crop_share) == ("big_vision", 0.875)
    config["pretrained_cfg"] |= {"interpolation": "nearest", "crop_mode": "border"}
    (folder / "config.json").write_text(json.dumps(config))
    assert any("crop_mode border" in note for note in read_external(folder).notes)


def test_a_folder_that_transformers_wrote_round_timm(tmp_path: Path) -> None:
    """TimmWrapper puts a prefix before all names."""
    model = _timm_model(act_layer="gelu_tanh")
    folder = _saved(model, tmp_path / "theirs", act_layer="gelu_tanh")
    config = json.loads((folder / "config.json").read_text())
    config["model_args"].pop("num_classes", None)  # transformers passes it itself
    (folder / "config.json").write_text(json.dumps(config))
    AutoModelForImageClassification.from_pretrained(folder).save_pretrained(tmp_path / "wrapped")
    meta, state = import_file(tmp_path / "wrapped")
    assert meta.model.gelu == "tanh"
    assert relative_difference(logits(rebuilt(meta, state), images()), logits(model, images())) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "arguments", "says"),
    [
        ("vit_base_patch16_224", {"global_pool": "max", "fc_norm": False}, "global_pool 'max'"),
        ("vit_base_patch16_224", {"pre_norm": True}, "pre_norm"),
        ("vit_base_patch16_224", {"act_layer": "quick_gelu"}, "activation QuickGELU"),
        ("vit_base_patch16_224", {"final_norm": False}, "Identity as its last norm"),
        ("vit_base_patch16_224", {"scale_mlp_norm": True}, "scale_mlp_norm"),
        ("vit_base_patch16_224", {"in_chans": 17}, "17 input channels"),
        ("vit_base_patch16_224", {"fc_norm": True}, "norm after global_pool 'token'"),
        ("vit_base_patch16_224", {"global_pool": "map", "pool_include_prefix": True}, "tokens in its pooling"),
        ("vit_base_patch16_224", {"img_size": (8, 72)}, "not square"),
    ],
)
def test_other_models_are_refused_in_words(
    tmp_path: Path, architecture: str, arguments: dict[str, Any], says: str
) -> None:
    folder = _saved(_timm_model(architecture, **arguments), tmp_path / "theirs", **arguments)
    with pytest.raises(ValueError, match=f"theirs (is|has) .*({says}).*we build no such model"):
        read_external(folder)


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"global_pool": "avg"}, "final_norm", "pooled"),
        ({"global_pool": "avg", "fc_norm": False}, "class_token", "kept"),
        ({"reg_tokens": 2}, "registers", 2),
        ({"qk_norm": True}, "qk_norm", "per_head"),
        ({"norm_layer": "rmsnorm"}, "norm", "rms"),
        ({"global_pool": "map", "reg_tokens": 2, "no_embed_class": True}, "class_token", "kept"),
    ],
)
def test_later_parts_are_read(tmp_path: Path, arguments: dict[str, Any], field: str, value: object) -> None:
    model = _timm_model(**arguments)
    meta, state = import_file(_saved(model, tmp_path / "theirs", **arguments))
    assert getattr(meta.model, field) == value
    assert relative_difference(logits(rebuilt(meta, state), images()), logits(model, images())) < 1e-5


def test_other_architectures_and_arguments_are_refused(tmp_path: Path) -> None:
    folder = _saved(_timm_model(), tmp_path / "theirs")
    good = json.loads((folder / "config.json").read_text())

    def change(**changes: object) -> None:
        (folder / "config.json").write_text(json.dumps(good | changes))

    change(architecture="test_resnet", model_args={})
    with pytest.raises(ValueError, match="test_resnet, a ResNet: only its VisionTransformer"):
        read_external(folder)
    change(architecture="vit_of_tomorrow")
    with pytest.raises(ValueError, match="'vit_of_tomorrow', which timm does not know"):
        read_external(folder)
    change(model_args={**SIZES, "checkpoint_path": "/etc/passwd"})
    with pytest.raises(ValueError, match="model_args checkpoint_path"):
        read_external(folder)
    change(model_args={**SIZES, "img_size": 25.5})
    with pytest.raises(ValueError, match="timm cannot build vit_base_patch16_224"):
        read_external(folder)
    change(model_args={**SIZES, "depth": 3})
    with pytest.raises(ValueError, match=r"not those of the model in its config\.json:\n(.*\n)*.*blocks\.3\."):
        import_file(folder)


def test_a_bare_state_dict_needs_its_heads(tmp_path: Path) -> None:
    model = _timm_model()
    file = tmp_path / "bare.pth"
    torch.save({"state_dict_ema": {f"module.{name}": value for name, value in model.state_dict().items()}}, file)
    with pytest.raises(ValueError, match=r"--heads, with --width 48 --depth 4 --mlp-dim 96 --patch-size 4"):
        read_external(file)
    config = ModelConfig(width=48, depth=4, heads=4, mlp_dim=96, patch_size=4)
    meta, state = import_file(file, config=config)
    assert (meta.model.gelu, meta.eval_protocol, meta.mean) == ("erf", "timm", (0.5, 0.5, 0.5))
    assert relative_difference(logits(rebuilt(meta, state), images()), logits(model, images())) < 1e-5

    asked = ModelConfig(**config.model_dump(exclude_unset=True), gelu="tanh", layer_norm_eps=1e-5)
    foreign = read_external(file, config=asked)
    assert (foreign.config.gelu, foreign.config.layer_norm_eps) == ("tanh", 1e-5)
    assert any("gelu is tanh as given, not the erf" in note for note in foreign.notes)


@pytest.mark.parametrize("part", ["norm_pre.weight", "blocks.0.attn.gate.weight"])
def test_a_bare_state_dict_with_foreign_parts_is_refused(tmp_path: Path, part: str) -> None:
    torch.save(_timm_model().state_dict() | {part: torch.zeros(1)}, tmp_path / "bare.pth")
    with pytest.raises(ValueError, match=f"see {part}: we build no such model"):
        read_external(tmp_path / "bare.pth")


def test_named_widths_tell_the_heads(tmp_path: Path) -> None:
    meta = described(ModelConfig(width=192, depth=13, heads=3, patch_size=4))
    torch.save(random_model(meta).state_dict(), tmp_path / "tiny.pth")
    foreign = read_external(tmp_path / "tiny.pth")
    assert foreign.config.sizes.heads == 3
    assert any("3 attention heads are assumed" in note for note in foreign.notes)


def test_a_stem_without_a_word_of_whose_it_is_is_refused(tmp_path: Path) -> None:
    state = random_model(described()).state_dict()
    state["patch_embed.backbone.stages.0.blocks.1.conv1.weight"] = torch.zeros(1)
    torch.save(state, tmp_path / "hybrid.pth")
    with pytest.raises(ValueError, match="ResNet stem and does not tell whose"):
        read_external(tmp_path / "hybrid.pth")
