"""`model.formats.torchvision_state`: torchvision's own class in and out."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from shardvit.model.config import ModelConfig
from shardvit.model.formats.detect import import_file, read_external
from shardvit.model.formats.export import export_model
from shardvit.model.formats.external_model import IMAGENET_MEAN, IMAGENET_STD
from shardvit.model.formats.torchvision_state import how_to_load
from shardvit.model.saved.model_folder import side_path
from tests.model.comparing import SMALL_TOKENS, randomise, relative_difference
from tests.model.formats.small_model import (
    CONFIG,
    described,
    images,
    logits,
    random_model,
    rebuilt,
)

SIZES = {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}
ERF = ModelConfig(**SIZES, gelu="erf")


def _theirs(**changes: Any) -> VisionTransformer:
    """Random weights everywhere."""
    model = VisionTransformer(
        **{
            "image_size": 24,
            "patch_size": 4,
            "num_layers": 4,
            "num_heads": 4,
            "hidden_dim": 48,
            "mlp_dim": 80,
            "num_classes": 5,
            **changes,
        }
    )
    return randomise(model, token_scale=SMALL_TOKENS).eval()


@pytest.mark.parametrize("representation_size", [None, 48])
def test_a_state_dict_of_torchvision_gives_its_logits(tmp_path: Path, representation_size: int | None) -> None:
    theirs = _theirs(representation_size=representation_size)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    with pytest.raises(ValueError, match="--heads"):
        import_file(tmp_path / "vit.pth")
    meta, state = import_file(tmp_path / "vit.pth", config=ModelConfig(**SIZES))
    assert (meta.model.gelu, meta.model.layer_norm_eps, meta.model.interpolation) == ("erf", 1e-6, "google")
    assert (meta.mean, meta.std, meta.eval_protocol) == (IMAGENET_MEAN, IMAGENET_STD, "big_vision")
    assert (meta.head, meta.image_size) == ("mlp" if representation_size else "linear", 24)
    assert relative_difference(logits(rebuilt(meta, state), images()), logits(theirs, images())) < 1e-5
    assert any("bicubic" in note for note in read_external(tmp_path / "vit.pth", config=ModelConfig(**SIZES)).notes)


def test_names_of_older_releases_are_read(tmp_path: Path) -> None:
    theirs = _theirs()
    old = {
        name.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): value
        for name, value in theirs.state_dict().items()
    }
    assert old.keys() != theirs.state_dict().keys()
    torch.save(old, tmp_path / "vit.pth")
    meta, state = import_file(tmp_path / "vit.pth", config=ModelConfig(**SIZES))
    assert relative_difference(logits(rebuilt(meta, state), images()), logits(theirs, images())) < 1e-5


def test_a_named_variant_tells_its_heads(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = torchvision.models.vit_b_32(num_classes=2).state_dict()
    torch.save({name: torch.zeros(1).expand(value.shape) for name, value in shapes.items()}, tmp_path / "vit.pth")
    foreign = read_external(tmp_path / "vit.pth")
    assert (foreign.config.variant, foreign.image_size, foreign.num_classes) == ("B/32", 224, 2)


def test_a_convolutional_stem_is_refused(tmp_path: Path) -> None:
    stem = [ConvStemConfig(8, 3, 2), ConvStemConfig(8, 3, 2)]
    torch.save(_theirs(conv_stem_configs=stem).state_dict(), tmp_path / "vit.pth")
    with pytest.raises(ValueError, match="convolutional stem"):
        read_external(tmp_path / "vit.pth")


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize(
    "config",
    [ERF, CONFIG, ModelConfig(**SIZES, layer_norm_eps=1e-3), ModelConfig(**SIZES, class_token_position="none")],
)
def test_an_export_loads_as_its_note_says(tmp_path: Path, head: Any, config: ModelConfig) -> None:
    meta = described(config, head=head, eval_protocol="timm", eval_crop_share=0.8)
    model = random_model(meta)
    notes = export_model(meta, model.state_dict(), to="torchvision", out=tmp_path / "vit.pth")
    assert any("GELU in the erf form" in note for note in notes) == (config.gelu == "tanh")
    lines = next(note for note in notes if note.startswith("load it with\n")).splitlines()[1:]
    space: dict[str, Any] = {"torch": torch, "torchvision": torchvision, "functools": __import__("functools")}
    exec("\n".join(lines), space)
    theirs = space["model"].eval()
    assert relative_difference(logits(theirs, images()), logits(model, images())) < 1e-5

    again, state = import_file(tmp_path / "vit.pth")
    assert again == meta
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    # the record speaks, but the user may
    asked = import_file(tmp_path / "vit.pth", config=ModelConfig(**SIZES, interpolation="timm"))[0]
    assert (asked.model.interpolation, asked.model.gelu) == ("timm", config.gelu)
    with pytest.raises(ValueError, match="has 4 attention heads, the model asked for has 8"):
        import_file(tmp_path / "vit.pth", config=ModelConfig(**SIZES | {"heads": 8}))


def test_a_named_variant_is_loaded_into_its_builder() -> None:
    meta = described(ModelConfig(variant="B/16", gelu="erf"), image_size=384)
    lines = how_to_load(meta, file=Path("x.pth"))
    assert lines[0] == "model = torchvision.models.vit_b_16(image_size=384, num_classes=5)"
    with torch.device("meta"):
        space: dict[str, Any] = {"torchvision": torchvision}
        exec(lines[0], space)
    assert space["model"].encoder.pos_embedding.shape == (1, 577, 768)


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    meta = described()
    export_model(meta, random_model(meta).state_dict(), to="torchvision", out=tmp_path / "vit.pth")
    side_path(tmp_path / "vit.pth").write_text("{}")
    with pytest.raises(ValueError, match=r"vit\.pth\.json is no record of shardvit"):
        read_external(tmp_path / "vit.pth")
