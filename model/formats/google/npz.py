"""Google's npz files, of google-research/vision_transformer and of google-research/big_vision: reading and writing.

Reading costs the model in float32 plus one array; names and shapes are compared with our model's before a weight is
read. Writing costs one array. A file comes back bit for bit. vision_transformer's class token has a position embedding,
big_vision's has none: in a file of the other code base a model has a row of zeros, or its token takes the row up.
Optimiser states are left out; BiT's own files are not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from model.formats.external_model import NO_HINTS, ExternalModel, UserHints, of_record
from model.formats.google.archive import NpzReader, write_npz
from model.formats.google.infer import infer_model
from model.formats.google.names import (
    BIG_VISION,
    VISION_TRANSFORMER,
    ArrayPart,
    NpzLayout,
    find_layout,
    from_google,
    slots_of,
    to_google,
)
from model.formats.library import move_class_row, with_all_positions
from model.positions.embedding import fixed_numbers, without_numbers
from model.saved.atomic import replaced_file
from model.saved.model_folder import SavedModelMeta, check_state
from model.saved.side_record import read_side_record, write_side_record
from model.saved.state_shapes import Shape, describe_differences, first_difference, shapes_of
from model.vit import build_model

GoogleNames = Literal["vision_transformer", "big_vision"]

_LAYOUTS: dict[GoogleNames, NpzLayout] = {"vision_transformer": VISION_TRANSFORMER, "big_vision": BIG_VISION}


def read_google_npz(path: Path, *, said: UserHints = NO_HINTS) -> ExternalModel:
    """The model in a file of either code base, in float32.

    A record beside it is believed; else the sizes are those of the arrays, with what the user `said`. Raises ValueError
    if the file is no npz, is damaged or holds something else, or arrays are missing, too many or of another shape than
    the model's; the message names the file.
    """
    path = Path(path)
    with NpzReader.open(path) as npz:
        meta = read_side_record(path)
        try:
            return _read(npz, meta=meta, said=said)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def write_google_npz(path: Path, state: Mapping[str, Tensor], *, meta: SavedModelMeta, names: GoogleNames) -> None:
    """Write weights under the names that a code base itself loads and that have a place for them, in float32, and our
    record beside them, atomically. Raises ValueError if `state` does not fit `meta`; nothing is written then."""
    path = Path(path)
    check_state(state, meta=meta, says=f"{path} is not written: the weights are not those of the model")
    layout = _LAYOUTS[names]
    if names == "vision_transformer":
        state = with_all_positions(state, meta=meta)
    elif meta.model.position == "sincos_2d":  # which big_vision computes itself
        layout = replace(layout, position=None)
    else:
        state = {**state, **fixed_numbers(meta.model, image_size=meta.image_size)}
        if meta.model.pool == "cls":
            state = move_class_row(state, config=meta.model.model_copy(update={"class_token_position": "none"}))
    with replaced_file(path) as beside:
        write_npz(beside, _arrays(state, layout=layout, heads=meta.model.sizes.heads))
        write_side_record(beside, meta=meta)


def _read(npz: NpzReader, *, meta: SavedModelMeta | None, said: UserHints) -> ExternalModel:
    layout = find_layout(npz.names)
    if layout is None:
        raise ValueError(
            "no Vision Transformer of Google's is in it: looked for the arrays embedding/kernel and "
            "Transformer/encoder_norm/scale, as such and under opt/target/, params/ and target/, but found "
            f"{', '.join(sorted(npz.names)[:4]) or 'none'}"
        )
    headers = {name: npz.header(name) for name in npz.names if name.startswith(layout.prefix)}
    shapes = {name: _unpadded(name, header.shape) for name, header in headers.items()}
    if meta is None:
        bare = {name.removeprefix(layout.prefix): shape for name, shape in shapes.items()}
        model = infer_model(bare, layout=layout, said=said)
        if model.num_classes == 0:
            of_head = (f"{layout.prefix}head/", f"{layout.prefix}pre_logits/")
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(of_head)}
        _refuse_lost_blocks(set(npz.names) - headers.keys(), depth=model.config.sizes.depth)
    elif meta.head == "masked_patch":
        raise ValueError("its record has the head masked_patch, which no file of Google's can have")
    else:
        model = of_record(meta, {}, format=f"Google's npz ({layout.code_base})")
    config = model.config
    if layout.position:
        model = replace(model, config=config.with_learned_positions)

    ours = _our_shapes(model)
    # Of a model with a record, that may have been written with the other code base's class token.
    if "pos_embed" in ours and model.config.pool == "cls":
        patches = model.config.grid_size(model.image_size) ** 2
        without = shapes.get(f"{layout.prefix}{layout.position}", ())[1:2] == (patches,)
        rows = patches if without and layout.code_base == BIG_VISION.code_base else patches + 1
        ours["pos_embed"] = (1, rows, model.config.sizes.width)
    slots = slots_of(ours, layout=layout)
    expected = expected_arrays(slots, ours, heads=model.config.sizes.heads, depth=model.config.sizes.depth)
    if shapes != expected:
        table = describe_differences(_in_our_names(shapes, slots), ours)
        raise ValueError(f"its arrays are not those of the model: {first_difference(shapes, expected)}\n{table}")

    state = move_class_row(_read_state(npz, slots, ours), config=model.config)
    state = without_numbers(state, config=config, image_size=model.image_size)
    notes = list(model.notes)
    if model.num_classes == 0:
        notes += [] if model.notes and model.headless in model.notes[-1] else ["The file has no head."]
    elif not state["head.weight" if model.head == "linear" else "head.logits.weight"].any():
        notes.append("The head is all zero: its predictions mean nothing, fine-tune it.")
    if others := sorted({header.precision for header in headers.values()} - {"float32"}):
        notes.append(f"Its numbers are {' and '.join(others)}, and are float32 here.")
    if left_out := len(npz.names) - len(headers):
        notes.append(f"{left_out} arrays outside {layout.prefix} (the optimiser's) are left out.")
    return replace(model, config=config, state=state, notes=tuple(notes))


def _refuse_lost_blocks(names: Collection[str], *, depth: int) -> None:
    """The optimiser's arrays are named like the weights, so they tell of blocks whose weights are missing."""
    found = [int(match[1]) for name in names if (match := re.search(r"/encoderblock_(\d+)/", f"/{name}"))]
    if found and max(found) >= depth:
        raise ValueError(
            f"it has the weights of {depth} blocks, and the optimiser's state of {max(found) + 1}: it is incomplete"
        )


def _our_shapes(model: ExternalModel) -> dict[str, Shape]:
    """The state dict of our model, without memory; without a head if the file has none."""
    with torch.device("meta"):
        built = build_model(
            model.config, image_size=model.image_size, num_classes=model.num_classes or 1, head=model.head
        )
    shapes = shapes_of(built.state_dict())
    return shapes if model.num_classes else {name: s for name, s in shapes.items() if not name.startswith("head.")}


def expected_arrays(slots: list[ArrayPart], ours: Mapping[str, Shape], *, heads: int, depth: int) -> dict[str, Shape]:
    """Name -> shape of each array that a file of our model has; `ours`: the state dict's shapes."""
    expected: dict[str, Shape] = {}
    for slot in slots:
        part = torch.empty(ours[slot.parameter], device="meta").chunk(slot.parts)[slot.part]
        shape = tuple(to_google(slot.axes, part, heads=heads).shape)
        expected[slot.array] = shape if slot.layer is None else (depth, *shape)
    return expected


def _in_our_names(found: Mapping[str, Shape], slots: list[ArrayPart]) -> dict[str, Shape]:
    """Shapes by our names of those parameters whose arrays are all present and fit together; by theirs of the rest."""
    parts: dict[str, list[Shape | None]] = {}
    for slot in slots:
        shape = found.get(slot.array)
        if shape is not None and slot.layer is not None:
            shape = shape[1:] if shape and slot.layer < shape[0] else None
        try:
            part = None if shape is None else tuple(from_google(slot.axes, torch.empty(shape, device="meta")).shape)
        except RuntimeError:  # of einops: another number of axes
            part = None
        parts.setdefault(slot.parameter, []).append(part)
    known = {slot.array for slot in slots}
    renamed = {name: shape for name, shape in found.items() if name not in known}
    for name, shapes in parts.items():
        whole = [shape for shape in shapes if shape]
        if len(whole) == len(shapes) and len({shape[1:] for shape in whole}) == 1:
            renamed[name] = (sum(shape[0] for shape in whole), *whole[0][1:])
    return renamed


def _unpadded(name: str, shape: Shape) -> Shape:
    """GroupNorm of older flax has (1, 1, 1, C): flax issue 1721."""
    return shape[3:] if shape[:3] == (1, 1, 1) and len(shape) == 4 and not name.endswith("kernel") else shape


def _read_state(npz: NpzReader, slots: list[ArrayPart], ours: Mapping[str, Shape]) -> dict[str, Tensor]:
    """All weights; an array is read once, though it may hold a part of each block (stacked)."""
    state = {name: torch.empty(shape, dtype=torch.float32) for name, shape in ours.items()}
    by_array: dict[str, list[ArrayPart]] = {}
    for slot in slots:
        by_array.setdefault(slot.array, []).append(slot)
    for name, its_slots in by_array.items():
        values = npz.read(name)
        for slot in its_slots:
            value = values if slot.layer is None else values[slot.layer]
            target = state[slot.parameter].chunk(slot.parts)[slot.part]
            target.copy_(from_google(slot.axes, value).reshape(target.shape))
    return state


def _arrays(state: Mapping[str, Tensor], *, layout: NpzLayout, heads: int) -> Iterator[tuple[str, Tensor]]:
    for slot in slots_of(state, layout=layout):
        part = state[slot.parameter].detach().chunk(slot.parts)[slot.part]
        yield slot.array, to_google(slot.axes, part.to("cpu", torch.float32), heads=heads)
