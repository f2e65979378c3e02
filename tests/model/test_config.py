"""`model.config` and `model.variants`: what may be said, what is refused and how, and at what cost."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from shardvit.model.config import LATER_BLOCKS, ModelConfig
from shardvit.model.variants import HYBRIDS, VARIANTS, ResnetSizes, VitSizes, resnet_stride

SMALL = {"width": 64, "depth": 4, "heads": 4, "patch_size": 4}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Ti/16", VitSizes(192, 12, 3, 768, 16)),
        ("S/16", VitSizes(384, 12, 6, 1536, 16)),
        ("B/16", VitSizes(768, 12, 12, 3072, 16)),
        ("B/32", VitSizes(768, 12, 12, 3072, 32)),
        ("B/8", VitSizes(768, 12, 12, 3072, 8)),
        ("L/16", VitSizes(1024, 24, 16, 4096, 16)),
        ("L/32", VitSizes(1024, 24, 16, 4096, 32)),
        ("H/14", VitSizes(1280, 32, 16, 5120, 14)),
        ("g/14", VitSizes(1408, 40, 16, 6144, 14)),
        ("G/14", VitSizes(1664, 48, 16, 8192, 14)),
        ("R50+B/16", VitSizes(768, 12, 12, 3072, 16, (3, 4, 9))),
        ("R50+L/32", VitSizes(1024, 24, 16, 4096, 32, (3, 4, 6, 3))),
        ("R26+S/32", VitSizes(384, 12, 6, 1536, 32, (2, 2, 2, 2))),
    ],
)
def test_named_variants_have_the_sizes_of_the_papers(name: str, sizes: VitSizes) -> None:
    config = ModelConfig(variant=name)
    assert config.kind == "vit"
    assert config.sizes == sizes
    assert config.num_features == sizes.width


@pytest.mark.parametrize(
    ("name", "sizes", "num_features"),
    [
        ("R50x1", ResnetSizes((3, 4, 6, 3), 1), 2048),
        ("R101x3", ResnetSizes((3, 4, 23, 3), 3), 6144),
        ("R152x4", ResnetSizes((3, 8, 36, 3), 4), 8192),
        ("R200x3", ResnetSizes((3, 24, 36, 3), 3), 6144),
    ],
)
def test_named_resnets_have_the_sizes_of_the_paper(name: str, sizes: ResnetSizes, num_features: int) -> None:
    config = ModelConfig(variant=name)
    assert config.kind == "resnet"
    assert config.resnet == sizes
    assert config.num_features == num_features


def test_every_variant_names_its_source_and_divides_into_heads() -> None:
    for name, variant in {**VARIANTS, **HYBRIDS}.items():
        assert "arXiv" in variant.source or "ViT paper" in variant.source, name
        assert variant.width % variant.heads == 0, name


def test_explicit_sizes() -> None:
    assert ModelConfig(**SMALL).sizes == VitSizes(64, 4, 4, 256, 4)
    assert ModelConfig(**SMALL, mlp_dim=100).sizes.mlp_dim == 100
    hybrid = ModelConfig(**{**SMALL, "patch_size": 16}, resnet_layers=(1, 2), resnet_width_factor=2)
    assert hybrid.kind == "vit"
    assert hybrid.sizes == VitSizes(64, 4, 4, 256, 16, (1, 2), 2)
    resnet = ModelConfig(resnet_layers=(1, 2, 1))
    assert resnet.kind == "resnet"
    assert (resnet.resnet, resnet.num_features) == (ResnetSizes((1, 2, 1), 1), 1024)


def test_every_choice_can_be_said() -> None:
    for pool in ("cls", "gap", "map"):
        assert ModelConfig(**SMALL, pool=pool).pool == pool
    for position in ("learned_1d", "learned_2d", "relative", "sincos_2d", "none"):
        assert ModelConfig(**SMALL, position=position).position == position
    for position in ("learned_1d", "learned_2d"):
        for position_at in ("stem", "every_layer", "every_layer_shared"):
            assert ModelConfig(**SMALL, position=position, position_at=position_at).position_at == position_at
            more = {"position": position, "position_at": position_at, "class_token_position": "none"}
            assert ModelConfig.model_validate(SMALL | more).prefix_rows == 0
    assert [ModelConfig(**SMALL, pool=pool).prefix_rows for pool in ("cls", "gap", "map")] == [1, 0, 0]
    config = ModelConfig(**SMALL, layer_scale=1e-5, gelu="erf", layer_norm_eps=1e-12, interpolation="timm")
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give a variant"),
        ({"variant": "B/16", "width": 64, "depth": 2}, "already fixes width, depth"),
        ({"variant": "B/16", "patch_size": 8}, "already fixes patch_size"),
        ({"width": 64, "depth": 4}, "heads, patch_size must be given too"),
        ({**SMALL, "heads": 5}, "heads 5 must divide width 64"),
        ({**SMALL, "depth": 0}, "greater than 0"),
        ({**SMALL, "dropout": 0.1}, "Extra inputs are not permitted"),
        ({"variant": "B"}, "such as 'B/16'"),
        ({"variant": "B/0"}, "such as 'B/16'"),
        ({"variant": "b/16"}, r"did you mean 'B/16'\?"),
        ({"variant": "Q/16"}, "known names: Ti, S, B"),
        ({"variant": "R50+B/16", "resnet_layers": (3, 4, 9)}, "already fixes resnet_layers"),
        ({"variant": "R50x1", "resnet_width_factor": 2}, "already fixes resnet_width_factor"),
        ({"variant": "R50+B16"}, r"did you mean 'R50\+B/16'\?.*known hybrids and ResNets: R50\+B/16"),
        ({"variant": "R50x5"}, r"variant 'R50x5' is unknown \(did you mean 'R50x[123]'\?\)"),
        ({"variant": "r50x1"}, "must be a name, a slash and a patch size.*R50x1"),
        ({"width": 64, "resnet_layers": (2, 2)}, "depth, heads, patch_size must be given too"),
        ({"depth": 4, "resnet_layers": (2, 2)}, "width, heads, patch_size must be given too"),
        ({"resnet_width_factor": 2}, "resnet_width_factor has no effect without resnet_layers"),
        ({**SMALL, "resnet_width_factor": 2}, "resnet_width_factor has no effect without resnet_layers"),
        ({"resnet_layers": ()}, "a pure ResNet has at least one stage"),
        ({"resnet_layers": (1, 1, 1, 1, 1)}, "at most 4 items"),
        ({"resnet_layers": (2, 0)}, "greater than 0"),
        ({"resnet_layers": (2,), "resnet_width_factor": 0}, "greater than 0"),
        ({**SMALL, "resnet_layers": (2, 2)}, "patch_size 4 is no multiple of the 8 pixels that a ResNet stem of 2"),
        ({**SMALL, "patch_size": 24, "resnet_layers": (1, 1, 1)}, "patch_size 24 is no multiple of the 16 pixels"),
        ({"variant": "R50x1", "pool": "gap"}, "pool: a pure ResNet has nothing of the kind"),
        (
            {"resnet_layers": (1,), "gelu": "erf", "position": "none"},
            "position, gelu: a pure ResNet has nothing of the kind; leave it out",
        ),
        ({"variant": "R50x1", "position_at": "every_layer"}, "position_at: a pure ResNet"),
        ({"variant": "R50x1", "layer_scale": 0.1}, "layer_scale: a pure ResNet"),
        ({"variant": "R50x1", "layer_norm_eps": 1e-5}, "layer_norm_eps: a pure ResNet"),
        ({"variant": "R50x1", "interpolation": "timm"}, "interpolation: a pure ResNet"),
        ({**SMALL, "position": "relative", "position_at": "every_layer"}, "Table 8.*not for relative: leave it out"),
        ({**SMALL, "position": "sincos_2d", "position_at": "every_layer_shared"}, "not for sincos_2d: leave it out"),
        ({**SMALL, "position": "none", "position_at": "every_layer"}, "not for none: leave it out"),
        ({**SMALL, "pool": "gap", "class_token_position": "none"}, "class_token_position has no effect with pool gap"),
        (
            {**SMALL, "position": "sincos_2d", "class_token_position": "none"},
            "class_token_position has no effect with position sincos_2d",
        ),
        ({"variant": "R50x1", "class_token_position": "none"}, "class_token_position: a pure ResNet"),
        ({**SMALL, "width": 66, "heads": 2, "position": "sincos_2d"}, "needs a width that 4 divides, not 66"),
        ({**SMALL, "width": 65, "heads": 5, "position": "learned_2d"}, "needs an even width, not 65"),
        ({**SMALL, "class_token": "kept"}, "class_token kept has no effect"),
        ({**SMALL, "final_norm": "pooled"}, "final_norm pooled is for pool gap"),
        ({**SMALL, "mlp": "swiglu", "gelu": "erf"}, "gelu has no effect"),
        ({**SMALL, "position": "relative", "rope": "axial"}, "rope axial does not go with position relative"),
        ({**SMALL, "position": "relative", "qk_norm": "per_head"}, "qk_norm per_head does not go"),
        ({**SMALL, "heads": SMALL["width"] // 2, "rope": "eva"}, "heads of a size that 4 divides, not 2"),
        ({"variant": "R50x1", "registers": 4}, "registers: a pure ResNet"),
        ({**SMALL, "layer_scale": 0}, "layer_scale\n.*greater than 0"),
        ({**SMALL, "layer_norm_eps": 0}, "layer_norm_eps\n.*greater than 0"),
        ({**SMALL, "pool": "token"}, "'cls', 'gap' or 'map'"),
        ({**SMALL, "position": "2d"}, "'learned_1d', 'learned_2d', 'relative', 'sincos_2d' or 'none'"),
        ({**SMALL, "position_at": "all"}, "'stem', 'every_layer' or 'every_layer_shared'"),
        ({**SMALL, "gelu": "relu"}, "'tanh' or 'erf'"),
        ({**SMALL, "interpolation": "bicubic"}, "'google' or 'timm'"),
    ],
)
def test_mistakes_are_refused_in_words(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ModelConfig.model_validate(given)


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(variant="B/16"),
        ModelConfig(variant="R50+B/16", pool="gap"),
        ModelConfig(variant="R152x4"),
        ModelConfig(**SMALL),
        ModelConfig(resnet_layers=(1, 2), resnet_width_factor=3),
    ],
)
def test_what_is_written_down_reads_back_equal(config: ModelConfig) -> None:
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    assert ModelConfig.model_validate(config.model_dump(exclude_none=True)) == config


def test_grid_size() -> None:
    config = ModelConfig(variant="L/16")
    assert (config.grid_size(224), config.grid_size(384)) == (14, 24)
    for image_size in (225, 0, -16, 8):
        with pytest.raises(ValueError, match=f"image size {image_size} is not a multiple of the patch size 16"):
            config.grid_size(image_size)


def test_grid_size_of_hybrids_and_resnets() -> None:
    hybrid, resnet = ModelConfig(variant="R50+L/32"), ModelConfig(variant="R50x1")
    assert (hybrid.grid_size(224), resnet.grid_size(224), resnet.grid_size(384)) == (7, 7, 12)
    with pytest.raises(ValueError, match="image size 200 is not a multiple of the patch size 32: take 192 or 224"):
        hybrid.grid_size(200)
    with pytest.raises(ValueError, match="image size 200 is not a multiple of the ResNet's stride 32: take 192 or 224"):
        resnet.grid_size(200)
    with pytest.raises(ValueError, match=r"image size 8 .* stride 32: take 32 or 64"):
        resnet.grid_size(8)


def test_a_stage_doubles_the_stride() -> None:
    assert [resnet_stride((1,) * stages) for stages in (1, 2, 3, 4)] == [4, 8, 16, 32]
    stems = [ModelConfig(**{**SMALL, "patch_size": size}, resnet_layers=(1, 1)).sizes for size in (8, 16, 40)]
    assert [stem.stem_patch_size for stem in stems] == [1, 2, 5]
    assert ModelConfig(**SMALL).sizes.stem_patch_size == 4


def test_reading_a_config_or_a_saved_record_imports_nothing_heavy() -> None:
    code = (
        "import sys, shardvit.model.config, shardvit.model.saved; "
        "shardvit.model.config.ModelConfig(variant='B/16').sizes; "
        "shardvit.model.config.ModelConfig(variant='R50x1').num_features; "
        "print(sorted({'torch', 'timm', 'numpy', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_later_blocks_are_written_only_where_they_are_used() -> None:
    """So that records, digests and summaries of other models stay as they were."""
    assert not set(LATER_BLOCKS) & ModelConfig(**SMALL).model_dump().keys()
    used = ModelConfig(**SMALL, registers=4, rope="axial")
    assert set(LATER_BLOCKS) & used.model_dump().keys() == {"registers", "rope"}
    assert ModelConfig.model_validate_json(used.model_dump_json()) == used
