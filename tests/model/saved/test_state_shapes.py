"""`model.saved.state_shapes`: the table, and the sentence that says what would fix it."""

from typing import Any

import pytest

from model.config import ModelConfig
from model.saved.model_folder import expected_shapes
from model.saved.state_shapes import Shape, describe_differences
from tests.model.formats.small_model import described

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
