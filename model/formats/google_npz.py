"""Read and write Google's npz files, of google-research/vision_transformer and google-research/big_vision.

Reading costs the model in float32 plus one array, writing one array; names and shapes are checked before any weight is
read. Round trips are bit-exact. vision_transformer's class token has a position, big_vision's has none: converting adds
a row of zeros, or adds the row to the token. Optimiser states are skipped; BiT's own files are not read.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from torch import Tensor

from shardvit.model.formats.external_model import (
    NO_HINTS,
    ExternalModel,
    UserHints,
    move_class_row,
    of_record,
    with_all_positions,
)
from shardvit.model.formats.google_names import (
    BIG_VISION,
    VISION_TRANSFORMER,
    ArrayPart,
    NpzLayout,
    find_layout,
    from_google,
    infer_model,
    slots_of,
    to_google,
)
from shardvit.model.positions.embedding import fixed_numbers, without_numbers
from shardvit.model.saved.atomic import replaced_file
from shardvit.model.saved.model_folder import SavedModelMeta, check_state, read_side_record, write_side_record
from shardvit.model.saved.state_shapes import Shape, describe_differences, first_difference, shapes_of
from shardvit.model.vit import build_model

GoogleNames = Literal["vision_transformer", "big_vision"]

_LAYOUTS: dict[GoogleNames, NpzLayout] = {"vision_transformer": VISION_TRANSFORMER, "big_vision": BIG_VISION}
_DAMAGES = (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)


def read_google_npz(path: Path, *, hints: UserHints = NO_HINTS) -> ExternalModel:
    """Read either code base's model in float32. Our record next to it is trusted; else sizes come from the arrays,
    completed by `hints`. ValueError names the file if it is damaged, or arrays are missing, surplus or misshapen."""
    path = Path(path)
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no npz file, or only the beginning of one ({error})") from None
    with archive:
        meta = read_side_record(path)
        try:
            return _read(_Npz(archive), meta=meta, hints=hints)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def write_google_npz(path: Path, state: Mapping[str, Tensor], *, meta: SavedModelMeta, names: GoogleNames) -> None:
    """Write float32 weights under the code base's names, plus our record, atomically; ValueError if they do not fit."""
    path = Path(path)
    check_state(state, meta=meta, says=f"{path} is not written: the weights are not those of the model")
    layout = _LAYOUTS[names]
    if names == "vision_transformer":
        state = with_all_positions(state, meta=meta)
    elif meta.model.position == "sincos_2d":  # big_vision computes it
        layout = replace(layout, position=None)
    else:
        state = {**state, **fixed_numbers(meta.model, image_size=meta.image_size)}
        if meta.model.pool == "cls":
            state = move_class_row(state, config=meta.model.model_copy(update={"class_token_position": "none"}))
    with replaced_file(path) as new:
        _write(new, state, layout=layout, heads=meta.model.sizes.heads)
        write_side_record(new, meta=meta)


def _read(npz: _Npz, *, meta: SavedModelMeta | None, hints: UserHints) -> ExternalModel:
    layout = find_layout(npz.names)
    if layout is None:
        raise ValueError(
            "no Vision Transformer of Google's is in it: looked for the arrays embedding/kernel and "
            "Transformer/encoder_norm/scale, as such and under opt/target/, params/ and target/, but found "
            f"{', '.join(sorted(npz.names)[:4]) or 'none'}"
        )
    headers = {name: npz.header(name) for name in npz.names if name.startswith(layout.prefix)}
    shapes = {name: _unpadded(name, shape) for name, (shape, _) in headers.items()}
    if meta is None:
        bare = {name.removeprefix(layout.prefix): shape for name, shape in shapes.items()}
        model = infer_model(bare, layout=layout, hints=hints)
        if model.num_classes == 0:
            of_head = (f"{layout.prefix}head/", f"{layout.prefix}pre_logits/")
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith(of_head)}
        _refuse_lost_blocks(set(npz.names) - headers.keys(), depth=model.config.sizes.depth)
    elif not meta.has_classes:
        raise ValueError(f"its record has the head {meta.head}, which no file of Google's can have")
    else:
        model = of_record(meta, {}, format=f"Google's npz ({layout.code_base})")
    config = model.config
    if layout.position:
        model = replace(model, config=config.with_learned_positions)

    ours = _our_shapes(model)
    # A file with our record may come from the other code base's class-token convention.
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
        notes.append("The head is all zero: its predictions are meaningless, fine-tune it.")
    if others := sorted({precision for _, precision in headers.values()} - {"float32"}):
        notes.append(f"Its numbers are {' and '.join(others)}, and are float32 here.")
    if left_out := len(npz.names) - len(headers):
        notes.append(f"{left_out} arrays outside {layout.prefix} (the optimiser's) are left out.")
    return replace(model, config=config, state=state, notes=tuple(notes))


def _refuse_lost_blocks(names: Collection[str], *, depth: int) -> None:
    """Compare with the optimiser's arrays, named like the weights, which reveal lost blocks."""
    found = [int(match[1]) for name in names if (match := re.search(r"/encoderblock_(\d+)/", f"/{name}"))]
    if found and max(found) >= depth:
        raise ValueError(
            f"it has the weights of {depth} blocks, and the optimiser's state of {max(found) + 1}: it is incomplete"
        )


def _our_shapes(model: ExternalModel) -> dict[str, Shape]:
    with torch.device("meta"):
        built = build_model(
            model.config, image_size=model.image_size, num_classes=model.num_classes or 1, head=model.head
        )
    shapes = shapes_of(built.state_dict())
    return shapes if model.num_classes else {name: s for name, s in shapes.items() if not name.startswith("head.")}


def expected_arrays(slots: list[ArrayPart], ours: Mapping[str, Shape], *, heads: int, depth: int) -> dict[str, Shape]:
    """Name -> shape of each array in a file of our model, whose state dict has the shapes `ours`."""
    expected: dict[str, Shape] = {}
    for slot in slots:
        part = torch.empty(ours[slot.parameter], device="meta").chunk(slot.parts)[slot.part]
        shape = tuple(to_google(slot.axes, part, heads=heads).shape)
        expected[slot.array] = shape if slot.layer is None else (depth, *shape)
    return expected


def _in_our_names(found: Mapping[str, Shape], slots: list[ArrayPart]) -> dict[str, Shape]:
    """Shapes under our names where a parameter's arrays are complete and fit; else under theirs."""
    parts: dict[str, list[Shape | None]] = {}
    for slot in slots:
        shape = found.get(slot.array)
        if shape is not None and slot.layer is not None:
            shape = shape[1:] if shape and slot.layer < shape[0] else None
        try:
            part = None if shape is None else tuple(from_google(slot.axes, torch.empty(shape, device="meta")).shape)
        except RuntimeError:  # einops: another number of axes
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


def _read_state(npz: _Npz, slots: list[ArrayPart], ours: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Read all weights, each array once, even if stacked over blocks."""
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


class _Npz:
    """Reads an npz array by array, without pickle, shapes first (`np.load` would read whole arrays for them)."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        counts = Counter(info.filename.removesuffix(".npy") for info in archive.infolist())
        name, times = max(counts.items(), key=lambda each: each[1], default=("", 0))
        if times > 1:
            raise ValueError(f"the array {name!r} is in it {times} times, and nothing says which one counts")
        self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        self.names = list(self._members)

    def header(self, name: str) -> tuple[Shape, str]:
        """Shape and dtype ("float32", "bfloat16") of an array, from its first bytes."""
        with self._member(name) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            missing = int(np.prod(shape, dtype=object)) * dtype.itemsize - (self._members[name].file_size - file.tell())
        # big_vision's bfloat16: unknown to numpy, which writes two opaque bytes
        precision = "bfloat16" if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None else str(dtype)
        if precision != "bfloat16" and dtype.kind != "f":
            raise ValueError(f"the array {name!r} holds {precision}, not floating-point numbers")
        if missing:
            raise ValueError(f"the array {name!r} is damaged: it has not as many bytes as its shape {shape} needs")
        return shape, precision

    def read(self, name: str) -> Tensor:
        with self._member(name) as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if array.dtype.kind == "V":
            return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))

    @contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._archive.open(self._members[name]) as file:
                yield file
        except _DAMAGES as error:
            raise ValueError(f"the array {name!r} cannot be read ({error})") from None


def _write(path: Path, state: Mapping[str, Tensor], *, layout: NpzLayout, heads: int) -> None:
    """Write array by array, without timestamps, so equal weights give equal bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for slot in slots_of(state, layout=layout):
            part = state[slot.parameter].detach().chunk(slot.parts)[slot.part].to("cpu", torch.float32)
            array = to_google(slot.axes, part, heads=heads).contiguous().numpy()
            with archive.open(zipfile.ZipInfo(f"{slot.array}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
