"""Read a saved engine state as parameter name -> tensors, whatever world size, ZeRO stage and backend wrote it.

ZeRO 0 and accelerate write one file. DeepSpeed cuts weights and moments into flat shards by ZeRO stage and world size,
and loads only its own cut; an address says which element of which file holds element i of a parameter. Files are
mapped, and a rank reads what it keeps. Exact to the last bit; at another world size gradients are summed in another
order, and float32 losses agree to about 1e-6. Executes nothing from the files (`reading`); does not check for damage
(`pipeline.checkpoint.store.damage_of`). Sources: deepspeed.utils.zero_to_fp32, `state_dict` of DeepSpeed 0.19's
optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.engine.saved_state.average import AVERAGE, average_file
from shardvit.pipeline.engine.saved_state.frozen import read_frozen
from shardvit.pipeline.engine.saved_state.reading import read_state
from shardvit.pipeline.engine.saved_state.state_files import left_out, put_back
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.vocabulary import OPTIMIZERS

# In a checkpoint, by backend and ZeRO stage.
ACCELERATE_FILE = "accelerate.pt"
DDP_FILE = "ddp.pt"
DEEPSPEED_FOLDER = "deepspeed"  # DeepSpeed's tag, a folder inside our checkpoint
WEIGHT = "weight"  # the master weight's name next to moments
_STEP = "step"  # Adam's counter in torch's optimizer state
_PIECE_ELEMENTS = 16 << 20  # sent at a time
_MOMENTS = {moment for optimizer in OPTIMIZERS.values() for moment in optimizer.moments}


@dataclass(frozen=True)
class LossScale:
    """The state of dynamic loss scaling (fp16)."""

    scale: float
    iteration: int  # attempted steps
    last_overflow: int  # the iteration of the last overflow; -1: none
    hysteresis: int | None  # overflows still tolerated; None: torch's scaler has none


@dataclass(frozen=True)
class _Address:
    """Element i of a parameter is in shard (lead + i) // stride, at base + (lead + i) % stride of a flat tensor."""

    flat: int  # index of the flat tensor within a shard
    lead: int
    stride: int
    base: int


@dataclass(frozen=True)
class PortableState:
    """An opened state that reads tensors on demand; `part` is collective where they come from rank 0."""

    shapes: dict[str, tuple[int, ...]]  # of all parameters, by the model's names
    buffers: dict[str, Tensor]
    # AdamW: exp_avg, exp_avg_sq; SGD: momentum_buffer; Muon: all three; {}: no step was applied yet
    moments: dict[str, torch.dtype]
    average_updates: int | None  # of the weights' moving average; None: the state has none
    optimizer_step: float | None  # for Adam's bias correction; None: SGD, or no step was applied yet
    global_steps: int  # attempted, as DeepSpeed counts
    global_samples: int
    skipped_steps: int
    loss_scale: LossScale | None
    _moments: dict[int, dict[str, torch.dtype]] = field(repr=False)  # by flat tensor
    _addresses: dict[str, _Address] = field(repr=False)
    # (shard, flat, WEIGHT, AVERAGE or a moment) -> 1-d tensor
    _flat: Callable[[int, int, str], Tensor] = field(repr=False)
    frozen: dict[str, Tensor] = field(default_factory=dict, repr=False)  # weights without moments, by name
    optimizer: dict[str, Any] | None = field(default=None, repr=False)  # torch's state_dict, if unsharded
    _ranks: Ranks | None = field(default=None, repr=False)  # who share the reading; None: each rank reads for itself
    _own: PortableState | None = field(default=None, repr=False)  # rank 0: the state it reads for the others
    _shares: Literal["all", "frozen"] = "frozen"  # what comes from rank 0

    def part(self, name: str, *, of: str, first: int, count: int) -> Tensor:
        """Read elements of a flattened parameter, on the CPU, weights in float32; `of`: WEIGHT, AVERAGE or a moment.
        May share memory with the mapped file: do not write to it."""
        if self._ranks is not None and (self._shares == "all" or name in self.frozen):
            mine = None if self._own is None else self._own.part(name, of=of, first=first, count=count)
            return _tensor_from_main(mine, count, ranks=self._ranks)
        if name in self.frozen:
            return self.frozen[name].detach().reshape(-1).narrow(0, first, count)
        address = self._addresses[name]
        pieces: list[Tensor] = []
        position, end = address.lead + first, address.lead + first + count
        while position < end:
            shard, offset = divmod(position, address.stride)
            length = min(address.stride - offset, end - position)
            pieces.append(self._flat(shard, address.flat, of).narrow(0, address.base + offset, length))
            position += length
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def moments_of(self, name: str) -> dict[str, torch.dtype]:
        """Name a trained parameter's moments and their types; under Muon parameters differ."""
        return self._moments.get(self._addresses[name].flat, {}) if name in self._addresses else {}

    def whole(self, name: str, *, of: str = WEIGHT) -> Tensor:
        shape = self.shapes[name]
        return self.part(name, of=of, first=0, count=torch.Size(shape).numel()).view(shape)


def open_state(folder: Path, *, written: Mapping[str, Any], model: nn.Module, besides: str = "") -> PortableState:
    """Open a checkpoint of identity `written`. `model`, on any device and perhaps sharded, gives names, order and
    shapes; it may lack the module `besides`. UserError if the state has another model or world size."""
    if written["backend"] == "accelerate":
        return open_whole(folder / ACCELERATE_FILE, model=model, besides=besides)
    if written["zero_stage"] == 0:
        return open_whole(folder / DDP_FILE, model=model, besides=besides)
    return open_deepspeed(
        folder / DEEPSPEED_FOLDER,
        zero_stage=written["zero_stage"],
        processes=written["processes"],
        model=model,
        besides=besides,
    )


def open_shared(
    folder: Path,
    *,
    written: Mapping[str, Any],
    model: nn.Module,
    ranks: Ranks,
    keeps: Literal["whole", "shard"],
    takes: Literal["pieces", "parameters"] = "pieces",
) -> PortableState:
    """`open_state`, collective, so that a state is read from disk once a run instead of once a rank: rank 0 reads and
    sends what all need (everything if each keeps the "whole"), and each rank reads its own shard. Travels over the
    ranks' host group; takes three times a piece's 64 MiB. Sets `optimizer` only if the optimizer `takes` parameters."""
    one_file = written["backend"] == "accelerate" or written["zero_stage"] == 0
    if ranks.place.world_size == 1 or (keeps == "shard" and one_file):  # mapped: a rank reads only its share
        return open_state(folder, written=written, model=model)
    own, known, problem = None, None, ""
    if ranks.place.is_main:
        try:
            own = open_state(folder, written=written, model=model)
            known = replace(
                own,
                buffers={name: buffer.clone() for name, buffer in own.buffers.items()},
                frozen={name: torch.empty(0) for name in own.frozen},
                optimizer=None,
                _flat=own._flat if isinstance(own._flat, StateShards) else _nothing,
            )
        except UserError as error:
            problem = str(error)
    known, problem = ranks.from_main((known, problem))
    if problem:
        raise UserError(problem)
    assert known is not None
    optimizer = _structure_from_main(own.optimizer if own else None, ranks=ranks) if takes == "parameters" else None
    shares = "all" if keeps == "whole" else "frozen"
    return replace(known, optimizer=optimizer, _ranks=ranks, _own=own, _shares=shares)


def _tensor_from_main(tensor: Tensor | None, count: int, *, ranks: Ranks) -> Tensor:
    """Send rank 0's 1-d tensor of `count` elements to every rank's CPU."""
    received: list[Tensor] = []
    for first in range(0, max(1, count), _PIECE_ELEMENTS):
        piece = None if tensor is None else tensor.narrow(0, first, min(_PIECE_ELEMENTS, count - first)).clone()
        piece = ranks.from_main(piece)
        assert piece is not None
        received.append(piece)
    return torch.cat(received)


def _structure_from_main(content: dict[str, Any] | None, *, ranks: Ranks) -> dict[str, Any]:
    structure, tensors = left_out(content)
    structure, shapes = ranks.from_main((structure, [tensor.shape for tensor in tensors]))
    mine = [tensor.reshape(-1) for tensor in tensors] if ranks.place.is_main else [None] * len(shapes)
    received = [
        _tensor_from_main(each, shape.numel(), ranks=ranks).view(shape)
        for each, shape in zip(mine, shapes, strict=True)
    ]
    return put_back(structure, received)


def _nothing(shard: int, flat: int, of: str) -> Tensor:
    raise AssertionError("it comes from rank 0")


def open_deepspeed(
    folder: Path, *, zero_stage: int, processes: int, model: nn.Module, besides: str = ""
) -> PortableState:
    """Open DeepSpeed's files of ZeRO 1 to 3; errors as in `open_state`."""
    # Each process writes one file of optimizer states; the first process's model file has the shapes.
    found = len(list(folder.glob("*_optim_states.pt")))
    if found != processes:
        raise UserError(f"checkpoint {folder.parent} has the shards of {found} processes instead of {processes}")
    shards, frozen = StateShards(folder, zero_stage=zero_stage), read_frozen(folder)
    first = "zero_pp_rank_0_mp_rank_00" if zero_stage == 3 else "mp_rank_00"
    content = read_state(folder / f"{first}_model_states.pt")
    groups: list[dict[str, torch.Size]] = content["param_shapes"]
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in frozen.items()}
    _check_fits(shapes, model=model, besides=besides, folder=folder.parent)
    shard, states = shards.optimizer(0), shards.states(0)
    return PortableState(
        shapes=shapes,
        buffers={name: content["module"][name] for name in content["buffer_names"]},
        average_updates=shards.averages(0).get("updates"),
        loss_scale=_loss_scale(vars(shard["loss_scaler"])),
        _addresses=_addresses_3(groups, processes=processes) if zero_stage == 3 else _addresses_1_2(groups, shard),
        _flat=shards,
        frozen=frozen,
        **_counted(content, states, groups=()),
    )


class StateShards:
    """DeepSpeed's files of optimizer states and our averages, one each a process, opened on first use."""

    def __init__(self, folder: Path, *, zero_stage: int) -> None:
        self._folder = folder
        self._prefix = "bf16_" if (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").exists() else ""
        self._flat_key, self._state_key = "single_partition_of_fp32_groups", "base_optimizer_state"
        if zero_stage == 3:
            self._flat_key, self._state_key = "fp32_flat_groups", "optimizer_state_dict"
        self._opened: dict[str, dict[str, Any]] = {}

    def __call__(self, rank: int, number: int, of: str) -> Tensor:
        if of == AVERAGE:
            return self.averages(rank)["averages"][str(number)]
        found = self.optimizer(rank)[self._flat_key][number] if of == WEIGHT else self.states(rank)[number][of]
        return found.detach()

    def optimizer(self, rank: int) -> dict[str, Any]:
        return self._read(f"{self._prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]

    def states(self, rank: int) -> dict[int, dict[str, Any]]:
        return self.optimizer(rank)[self._state_key]["state"]

    def averages(self, rank: int) -> dict[str, Any]:
        """Read `WeightAverage.state`; {} if none was saved."""
        return self._read(average_file(rank)) if (self._folder / average_file(rank)).exists() else {}

    def _read(self, name: str) -> dict[str, Any]:
        if name not in self._opened:
            self._opened[name] = read_state(self._folder / name)
        return self._opened[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": {}}


def open_whole(file: Path, *, model: nn.Module, besides: str = "") -> PortableState:
    """Open a `ReplicatedEngine`'s single file; errors as in `open_state`."""
    folder = file.parent
    earlier = UserError(f"checkpoint {folder} was written by an earlier shardvit: continue with that version")
    if not file.exists() and (folder / DEEPSPEED_FOLDER).exists():  # ZeRO 0 was DeepSpeed's
        raise earlier
    content, average = read_state(file), folder / average_file(0)
    averages = read_state(average) if average.exists() else {}
    weights: dict[str, Tensor] = dict(content["model"])
    parameters = {name for name, _ in model.named_parameters()}
    buffers = {name: weights.pop(name) for name in model.state_dict() if name not in parameters}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    _check_fits(shapes, model=model, besides=besides, folder=folder)

    torchs: dict[str, Any] = content["optimizer"]
    if any("param_names" not in group for group in torchs["param_groups"]):
        raise earlier
    names: list[str] = [name for group in torchs["param_groups"] for name in group["param_names"]]
    states, counted = torchs["state"], _counted(content, torchs["state"], groups=torchs["param_groups"])
    if missing := [name for number, name in enumerate(names) if counted["moments"] and number not in states]:
        moment = next(iter(counted["moments"]))
        raise UserError(f"checkpoint {folder} holds no {moment} of {_few(missing)}: take an older one")

    def flat(_: int, number: int, of: str) -> Tensor:
        if of == AVERAGE:
            return averages["averages"][names[number]].reshape(-1)
        tensor = weights[names[number]] if of == WEIGHT else states[number][of]
        return tensor.detach().reshape(-1).to(torch.float32 if of == WEIGHT else tensor.dtype)

    return PortableState(
        shapes=shapes,
        buffers=buffers,
        average_updates=averages.get("updates"),
        loss_scale=_loss_scale(content.get("scaler") or {}),
        _addresses={
            name: _Address(flat=number, lead=0, stride=max(1, weights[name].numel()), base=0)
            for number, name in enumerate(names)
        },
        _flat=flat,
        frozen={name: tensor for name, tensor in weights.items() if name not in names},
        optimizer=torchs,
        **counted,
    )


def _addresses_1_2(groups: list[dict[str, torch.Size]], shard: dict[str, Any]) -> dict[str, _Address]:
    """ZeRO 1 and 2 cut a group's concatenated parameters into equal shards; the padding is not saved."""
    addresses: dict[str, _Address] = {}
    for number, group in enumerate(groups):
        stride = shard["single_partition_of_fp32_groups"][number].numel() + shard["group_paddings"][number]
        lead = 0
        for (name, shape), padding in zip(group.items(), shard["param_alignment_paddings"][number], strict=True):
            addresses[name] = _Address(flat=number, lead=lead, stride=stride, base=0)
            lead += shape.numel() + padding
    return addresses


def _addresses_3(groups: list[dict[str, torch.Size]], *, processes: int) -> dict[str, _Address]:
    """ZeRO 3 cuts each parameter into equal shards and concatenates a group's pieces."""
    addresses: dict[str, _Address] = {}
    for number, group in enumerate(groups):
        base = 0
        for name, shape in group.items():
            stride = -(-shape.numel() // processes)
            addresses[name] = _Address(flat=number, lead=0, stride=stride, base=base)
            base += stride
    return addresses


def _check_fits(shapes: Mapping[str, tuple[int, ...]], *, model: nn.Module, besides: str, folder: Path) -> None:
    # Under ZeRO 3 a parameter's own shape is empty.
    wanted = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    lacking, foreign = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    foreign = [name for name in foreign if not besides or not name.startswith(f"{besides}.")]
    reshaped = [name for name in wanted if name in shapes and shapes[name] != wanted[name]]
    others = [f"{name} is {list(shapes[name])} instead of {list(wanted[name])}" for name in reshaped]
    phrases = (("it lacks {}", lacking), ("it has {} besides", foreign), ("{}", others))
    if said := [phrase.format(_few(names)) for phrase, names in phrases if names]:
        raise UserError(f"checkpoint {folder} is of another model than its recipe says: {'; '.join(said)}")


def _few(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _counted(
    content: Mapping[str, Any], states: Mapping[int, Mapping[str, Any]], *, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """`groups`: timm's LAMB, of earlier checkpoints, counts steps in them."""
    moments = {
        number: {key: value.dtype for key, value in state.items() if key in _MOMENTS and value is not None}
        for number, state in states.items()
    }
    steps = [each[_STEP] for each in (*states.values(), *groups) if each.get(_STEP) is not None]
    return {
        "moments": {key: dtype for each in moments.values() for key, dtype in each.items()},
        "_moments": moments,
        "optimizer_step": float(steps[0]) if steps else None,
        **{key: content.get(key, 0) for key in ("global_steps", "global_samples", "skipped_steps")},
    }


def _loss_scale(scaler: Mapping[str, Any]) -> LossScale | None:
    """Read DeepSpeed's scaler, or torch's, which counts steps since the last overflow."""
    if "_growth_tracker" in scaler:
        return LossScale(scaler["scale"], iteration=scaler["_growth_tracker"], last_overflow=-1, hysteresis=None)
    if not scaler.get("dynamic", False):
        return None
    return LossScale(
        scaler["cur_scale"],
        iteration=scaler["cur_iter"],
        last_overflow=scaler["last_overflow_iter"],
        hysteresis=scaler.get("cur_hysteresis"),
    )
