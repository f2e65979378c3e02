"""What is wrong when tensors and model do not fit: a table of the differences, and what would fix it.

Costs nothing beyond the text. It compares names and shapes, never values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from model.formats.state_sizes import Shape, StateSizes, read_sizes, variant_of

if TYPE_CHECKING:
    from torch import Tensor

    from model.saved import SavedModelMeta

_MAX_ROWS = 20


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Name -> shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def expected_shapes(meta: SavedModelMeta) -> dict[str, Shape]:
    """Name -> shape of each tensor of the model that a record describes (built without memory)."""
    import torch

    from model.saved import build_described

    with torch.device("meta"):
        return shapes_of(build_described(meta).state_dict())


def describe_differences(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """A table of all names whose shapes differ (the first 20), then one line for each thing that would fix it.

    Args:
        found: name -> shape in the file, under our names.
        expected: name -> shape in the model.

    Returns "" where both are the same.
    """
    names = sorted((name for name in {*found, *expected} if found.get(name) != expected.get(name)), key=_in_order)
    if not names:
        return ""
    rows = [("name", "in the file", "in the model")]
    rows += [(name, _shown(found.get(name)), _shown(expected.get(name))) for name in names[:_MAX_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {left:<{widths[1]}}  {right}" for name, left, right in rows]
    if len(names) > _MAX_ROWS:
        lines.append(f"  and {len(names) - _MAX_ROWS} more")
    return "\n".join([*lines, *_what_would_fix_it(found, expected)])


def _what_would_fix_it(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    """One sentence for each kind of difference: variant, pooling, layer scale, resolution, classes."""
    if not found.keys() & expected.keys():
        return ["No name is one of this model's: the file holds another kind of model, or names it in another way."]
    missing, extra = len(expected.keys() - found.keys()), len(found.keys() - expected.keys())
    other = f"Tensors that are missing: {missing}; that do not belong to the model: {extra}; the rest differ in shape."
    try:
        model = read_sizes(expected, origin="the model")
    except ValueError:  # no Transformer, of which alone something can be said
        return [other]
    try:
        file = read_sizes(found, origin="the file")
    except ValueError as error:
        return [f"{error}."[:1].upper() + f"{error}."[1:]]
    fixes: list[str] = []
    if file.trunk != model.trunk:
        variant = variant_of(file)
        fixes.append(
            f"The file holds a {variant}: give --variant {variant}."
            if variant
            else f"The file holds a model of other sizes: give {file.in_words()} and its --heads."
        )
    if file.pool != model.pool:
        fixes.append(f"The file pools by {file.pool}, the model by {model.pool}: give pool {file.pool}.")
    if file.layer_scale != model.layer_scale:
        fixes.append(
            "The file has layer scale (blocks.*.ls1, ls2), the model has none: give layer_scale."
            if file.layer_scale
            else "The model has layer_scale, the file has none: leave it out."
        )
    if file.grid_size != model.grid_size:
        fixes.append(_other_grid(file, model))
    if (file.head, file.num_classes) != (model.head, model.num_classes):
        fixes.append(_other_head(file, model))
    if fixes:
        return fixes
    return [
        f"{other} Sizes, resolution and classes are the same: the file is incomplete, or of a model with parts that "
        "this one does not have."
    ]


def _other_grid(file: StateSizes, model: StateSizes) -> str:
    if file.grid_size is None or model.grid_size is None:
        return "Learned 1-D position embeddings (pos_embed) are in one of the two only: give the other's position."
    return (
        f"The file was trained on images of {file.grid_size * file.patch_size} pixels ({file.grid_size} x "
        f"{file.grid_size} patches), the model is for {model.grid_size * model.patch_size}: import with --image-size "
        f"{model.grid_size * model.patch_size} to interpolate, or give {file.grid_size * file.patch_size}."
    )


def _other_head(file: StateSizes, model: StateSizes) -> str:
    if file.num_classes == 0:
        return f"The file has no head: import with --num-classes {model.num_classes} to attach a zero one."
    if file.num_classes != model.num_classes:
        return (
            f"The file has {file.num_classes} classes, the model {model.num_classes}: give --num-classes "
            f"{file.num_classes} to keep the file's head, or import with --num-classes {model.num_classes} to replace "
            "it by a zero one."
        )
    return f"The file's head is {file.head}, the model's is {model.head}: the record must say {file.head}."


def _shown(shape: Shape | None) -> str:
    return "missing" if shape is None else str(shape)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sorts blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.]", name)]
