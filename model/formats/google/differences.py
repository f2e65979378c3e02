"""What is wrong when the arrays of one of Google's files are not those of our model: theirs by name, and our table.

Costs nothing: names and shapes only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from model.differences import describe_differences
from model.formats.google.axes import Shape, google_shape, our_shape
from model.formats.google.names import Slot


def expected_arrays(slots: list[Slot], ours: Mapping[str, Shape], *, heads: int, depth: int) -> dict[str, Shape]:
    """Name -> shape of each array that a file of our model has; `ours` are the shapes of the state dict."""
    expected: dict[str, Shape] = {}
    for slot in slots:
        first, *others = ours[slot.parameter]
        shape = google_shape(slot.axes, (first // slot.parts, *others), heads=heads)
        expected[slot.array] = shape if slot.layer is None else (depth, *shape)
    return expected


def describe_array_differences(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], *, slots: list[Slot], ours: Mapping[str, Shape]
) -> str:
    """The first array that differs, by Google's name, and the table of `describe_differences`, by ours.

    Args:
        found: name -> shape in the file.
        expected: the same of the model (`expected_arrays`).
        slots: where our parameters are.
        ours: name -> shape in the model's state dict.
    """
    first = min(name for name in {**found, **expected} if found.get(name) != expected.get(name))
    if first not in found:
        problem = f"{first!r} is missing"
    elif first not in expected:
        problem = f"{first!r} does not belong to it"
    else:
        problem = f"{first!r} has the shape {found[first]} instead of {expected[first]}"
    known = {slot.array for slot in slots}
    in_our_names = {name: shape for name, shape in found.items() if name not in known}
    in_our_names |= _parameters(found, slots)
    table = describe_differences(_with_class_row(in_our_names), _with_class_row(ours))
    return f"its arrays are not those of the model: {problem}\n{table}"


def _with_class_row(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Position embeddings counted as ours are, the class token's among them: big_vision has none for it."""
    counted = dict(shapes)
    position = counted.get("pos_embed", ())
    if "cls_token" in counted and len(position) == 3 and math.isqrt(position[1]) ** 2 == position[1]:
        counted["pos_embed"] = (position[0], position[1] + 1, position[2])
    return counted


def _parameters(found: Mapping[str, Shape], slots: list[Slot]) -> dict[str, Shape]:
    """Name -> shape of those parameters of ours whose arrays are all there and fit together."""
    by_parameter: dict[str, list[Shape | None]] = {}
    for slot in slots:
        shape = found.get(slot.array)
        if shape is not None and slot.layer is not None:
            shape = shape[1:] if shape and slot.layer < shape[0] else None
        by_parameter.setdefault(slot.parameter, []).append(our_shape(slot.axes, shape) if shape is not None else None)
    parameters: dict[str, Shape] = {}
    for name, parts in by_parameter.items():
        whole = [part for part in parts if part]
        if len(whole) == len(parts) and len({part[1:] for part in whole}) == 1:
            parameters[name] = (sum(part[0] for part in whole), *whole[0][1:])
    return parameters
