"""Blocks that came after the paper, against timm's own models: through folders, both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from shardvit.model.config import ModelConfig
from shardvit.model.formats.detect import import_file, read_external
from shardvit.model.init import initialise
from shardvit.model.positions.interpolation import resize_state
from shardvit.model.saved.model_folder import (
    SavedModelMeta,
    build_described,
    build_from_saved,
    save_model,
    timm_objection,
)
from shardvit.model.vit import build_model, takes_other_sizes
from tests.model.comparing import randomise
from tests.model.later_blocks import LATER_BLOCKS, fitting
from tests.oracles.conftest import Measured

SIZES: dict[str, Any] = {"width": 48, "depth": 2, "heads": 4, "patch_size": 4}
IMAGES = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))


def words(more: dict[str, Any]) -> str:
    return " ".join(map(str, more.values()))


def of_timm(more: dict[str, Any], *, pool: str) -> dict[str, Any]:
    """As far as timm can build it: with RoPE, its MLPs have the erf GELU and its attention pooling reads all tokens."""
    kept = fitting(more, pool=pool)
    if kept.get("rope", "none") != "none" and "mlp" not in kept:
        kept["gelu"] = "erf"
    return kept


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize("more", LATER_BLOCKS, ids=words)
def test_timm_loads_our_folder_and_computes_the_same(
    more: dict[str, Any], pool: str, tmp_path: Path, measured: Measured
) -> None:
    config = ModelConfig(**SIZES, **of_timm(more, pool=pool))
    meta = SavedModelMeta(
        model=config, image_size=24, num_classes=5, class_names=tuple("abcde"), head="linear", loss="softmax"
    )
    ours = randomise(build_model(config, image_size=24, num_classes=5, head="linear")).eval()
    save_model(tmp_path / "model", ours.state_dict(), meta=meta)
    _, again = build_from_saved(tmp_path / "model")
    with torch.no_grad():
        expected = ours(IMAGES)
        assert torch.equal(again.eval()(IMAGES), expected)
        if timm_objection(meta) is not None:
            assert "relative" in words(more) or "learned_2d" in words(more) or (pool == "map" and "rope" in more)
            return
        theirs = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
        measured(f"ViT: {pool}, {config.later_blocks or 'no later block'}", "timm", "logits", expected, theirs(IMAGES))
        assert expected.abs().mean() > 0.1


@pytest.mark.parametrize("style", ["google", "timm", "big_vision"])
@pytest.mark.parametrize("more", LATER_BLOCKS, ids=words)
def test_every_parameter_has_an_initial_value_and_a_gradient(more: dict[str, Any], style: Any) -> None:
    model = build_model(ModelConfig(**SIZES, **fitting(more, pool="gap")), image_size=24, num_classes=5, head="linear")
    initialise(model, seed=0, style=style)
    torch.nn.init.normal_(model.get_parameter("head.weight"))
    model(IMAGES).square().sum().backward()
    without = [name for name, it in model.named_parameters() if it.grad is None or not it.grad.any()]
    assert without == []


TINY: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4}
RELEASED = [
    ("vit_base_patch16_reg4_gap_256", {}, {"registers": 4, "final_norm": "pooled", "class_token_position": "none"}),
    ("vit_so150m_patch16_reg4_gap_256", {}, {"registers": 4, "pool": "gap"}),
    ("vit_so150m_patch16_reg4_map_256", {}, {"registers": 4, "pool": "map"}),
    ("vit_medium_patch16_gap_256", {}, {"pool": "gap"}),
    ("deit_small_patch16_224", {}, {"pool": "cls"}),
    ("deit3_small_patch16_224", {}, {"class_token_position": "none"}),
    ("vit_small_patch14_dinov2", {"img_size": 56}, {"pool": "cls"}),
    ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, {"registers": 4, "class_token_position": "none"}),
    ("vit_giant_patch14_reg4_dinov2", {"img_size": 56}, {"mlp": "swiglu", "registers": 4}),
    ("vit_base_patch16_rope_reg1_gap_256", {}, {"rope": "eva", "registers": 1, "final_norm": "pooled"}),
    ("vit_mediumd_patch16_rope_reg1_gap_256", {}, {"rope": "eva", "position": "none"}),
    ("vit_small_patch16_rope_224", {}, {"rope": "axial", "position": "none"}),
    ("vit_small_patch16_rope_ape_224", {}, {"rope": "axial", "position": "learned_1d"}),
    ("vit_small_patch16_rope_mixed_224", {}, {"rope": "mixed", "position": "none"}),
    ("vit_small_patch16_rope_mixed_ape_224", {}, {"rope": "mixed", "class_token_position": "none"}),
    ("eva02_tiny_patch14_224", {}, {"rope": "eva", "mlp": "swiglu", "class_token": "kept", "final_norm": "pooled"}),
    ("eva02_base_patch14_448", {}, {"rope": "eva", "mlp": "swiglu_norm", "pool": "gap"}),
    ("vit_small_patch16_dinov3", {}, {"rope": "dinov3", "registers": 4, "class_token": "kept", "pool": "gap"}),
    ("vit_small_plus_patch16_dinov3_qkvb", {}, {"rope": "dinov3", "mlp": "swiglu", "layer_norm_eps": 1e-5}),
]


@pytest.mark.parametrize(("name", "more", "expected"), RELEASED, ids=[name for name, _, _ in RELEASED])
def test_a_released_architecture_is_read_and_computes_the_same(
    name: str, more: dict[str, Any], expected: dict[str, Any], tmp_path: Path, measured: Measured
) -> None:
    """Small ones of its kind: width, depth and heads are arguments of timm's, as a user's config.json has them."""
    arguments = TINY | more
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=5, **arguments).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = {"architecture": name, "num_classes": 5, "model_args": arguments, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    meta, state = import_file(tmp_path)
    found = meta.model.model_dump()
    assert {key: found.get(key) for key in expected} == expected
    ours = build_described(meta).eval()
    ours.load_state_dict(state)
    images = torch.randn(2, 3, meta.image_size, meta.image_size)
    with torch.no_grad():
        logits = theirs(images)
        measured(f"ViT: {name} imported", "timm", "logits", ours(images), logits)
        assert logits.abs().mean() > 0.03
    larger = 2 * meta.image_size
    meta, state = import_file(tmp_path, image_size=larger)
    theirs.set_input_size((larger, larger)) if not getattr(theirs, "dynamic_img_size", False) else None
    ours = build_described(meta).eval()
    ours.load_state_dict(state)
    images = torch.randn(1, 3, larger, larger)
    with torch.no_grad():
        measured(f"ViT: {name} at twice the resolution", "timm", "logits", ours(images), theirs(images))


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("vit_base_patch16_sapiens2", {"img_size": 32, "num_kv_heads": 2}, "fewer keys"),
        ("vit_pe_core_small_patch16_384", {}, "norm before the blocks"),
        ("eva02_base_patch16_clip_224", {}, "AttentionRope|attn.norm"),
        ("eva02_enormous_patch14_clip_224", {}, "EvaBlockPostNorm"),
        ("vit_small_patch16_rope_224", {"rope_temperature": 50.0}, "rotations"),
    ],
)
def test_what_is_ours_in_no_way_is_refused(name: str, more: dict[str, Any], says: str, tmp_path: Path) -> None:
    theirs = timm.create_model(name, num_classes=5, **TINY, **more)
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": name, "num_classes": 5, "model_args": TINY | more})
    )
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        read_external(tmp_path)


@pytest.mark.parametrize("more", [more for more in LATER_BLOCKS if "relative" not in words(more)], ids=words)
def test_a_model_that_takes_other_sizes_rotates_by_their_grid(more: dict[str, Any]) -> None:
    config = ModelConfig(**SIZES, **fitting(more, pool="gap"), interpolation="timm")
    small, large = (
        randomise(build_model(config, image_size=size, num_classes=5, head="linear")).eval() for size in (16, 24)
    )
    state = resize_state(small.state_dict(), config=config, from_image_size=16, to_image_size=24)
    large.load_state_dict(state)
    takes_other_sizes(small, interpolation="timm")
    with torch.no_grad():
        again = small(IMAGES[:, :, :16, :16])
        torch.testing.assert_close(small(IMAGES), large(IMAGES), rtol=1e-4, atol=1e-5)
        assert torch.equal(small(IMAGES[:, :, :16, :16]), again)
