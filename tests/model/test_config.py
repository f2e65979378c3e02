"""`model.config` and `model.variants`: what may be said, what is refused and how, and at what cost."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from model.config import ModelConfig, VitSizes
from model.variants import VARIANTS

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
    ],
)
def test_named_variants_have_the_sizes_of_the_papers(name: str, sizes: VitSizes) -> None:
    assert ModelConfig(variant=name).sizes == sizes


def test_every_variant_names_its_source_and_divides_into_heads() -> None:
    for name, variant in VARIANTS.items():
        assert "arXiv" in variant.source, name
        assert variant.width % variant.heads == 0, name


def test_explicit_sizes() -> None:
    assert ModelConfig(**SMALL).sizes == VitSizes(64, 4, 4, 256, 4)
    assert ModelConfig(**SMALL, mlp_dim=100).sizes.mlp_dim == 100


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
    ],
)
def test_mistakes_are_refused_in_words(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ModelConfig.model_validate(given)


@pytest.mark.parametrize("config", [ModelConfig(variant="B/16"), ModelConfig(**SMALL)])
def test_what_is_written_down_reads_back_equal(config: ModelConfig) -> None:
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    assert ModelConfig.model_validate(config.model_dump(exclude_none=True)) == config


def test_grid_size() -> None:
    sizes = ModelConfig(variant="L/16").sizes
    assert (sizes.grid_size(224), sizes.grid_size(384)) == (14, 24)
    for image_size in (225, 0, -16, 8):
        with pytest.raises(ValueError, match=f"image size {image_size} is not a multiple of the patch size 16"):
            sizes.grid_size(image_size)


def test_reading_a_config_or_a_saved_record_imports_nothing_heavy() -> None:
    code = (
        "import sys, model.config, model.saved; model.config.ModelConfig(variant='B/16').sizes; "
        "print(sorted({'torch', 'timm', 'numpy', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
