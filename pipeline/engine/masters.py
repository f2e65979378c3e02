"""Where a running DeepSpeed engine keeps its master weights and moments, and how saved ones are put there.

Stage 0 keeps whole parameters, stages 1 and 2 a piece of each flattened group, stage 3 a piece of each parameter;
`slots` maps them all, so that restoring is one copy in every stage. DeepSpeed's own setters are not used: stage 3's
fails where the world size does not divide a parameter's size, and none creates moments. Relies on attributes of
DeepSpeed 0.19's optimizers; does not import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.engine.average import AVERAGE, WeightAverage
from pipeline.engine.frozen import put_frozen
from pipeline.engine.portable import WEIGHT, LossScale, PortableState


@dataclass(frozen=True)
class Slot:
    """Elements `first` to `first + count` of a flattened parameter, at `start` in the flat `master` and its moments."""

    master: Tensor
    start: int
    first: int
    count: int

    def fill(self, tensor: Tensor, values: Tensor) -> None:
        tensor.detach().view(-1).narrow(0, self.start, self.count).copy_(values)


def slots(engine: Any, *, rank: int) -> dict[str, Slot]:
    """This rank's share of each trained parameter, by name; those without a share are left out."""
    optimizer = engine.optimizer
    unsharded = unsharded_masters(optimizer)
    found: dict[str, Slot] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue  # frozen: not the optimizer's
        if hasattr(parameter, "ds_id"):  # stage 3: equal pieces, the last of them padded
            flat, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first = rank * size
            count = min(size, parameter.ds_numel - first)
            slot = Slot(optimizer.fp32_partitioned_groups_flat[flat], start, first, count)
        elif not hasattr(parameter, "_hp_mapping"):  # stage 0
            master = unsharded.get(id(parameter))
            slot = Slot(parameter if master is None else master, 0, 0, parameter.numel())
        elif (mapping := parameter._hp_mapping) is not None:  # stages 1 and 2
            group, address = mapping.param_group_index, mapping.hp_fragment_address
            flat = optimizer.single_partition_of_fp32_groups[group]
            slot = Slot(flat, address.start, mapping.lp_fragment_address.start, address.numel)
        else:
            continue
        if slot.count > 0:
            found[name] = slot
    return found


def unsharded_masters(optimizer: Any) -> dict[int, Tensor]:
    """Stage 0 in half precision: id of the half parameter -> its float32 master; empty in all other cases."""
    if not hasattr(optimizer, "fp32_groups") or not hasattr(optimizer, "fp16_groups"):
        return {}
    return {
        id(half): master
        for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for half, master in zip(halves, masters, strict=True)
    }


def put_state(engine: Any, saved: PortableState, *, rank: int, takes: Literal["pieces", "parameters"]) -> None:
    """Load weights, moments and counters into an engine; collective, as half weights are gathered. `takes`: what the
    optimizer does; one of whole parameters may keep anything, and torch puts it back."""
    places = slots(engine, rank=rank)
    torch_optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)  # inside DeepSpeed's, except in fp32
    torch_optimizer.state.clear()
    if takes == "parameters":
        assert saved.optimizer, "the recipe allows such an optimizer at ZeRO 0 alone"
        torch_optimizer.load_state_dict({**saved.optimizer, "state": _copied(saved.optimizer["state"])})
    moments = saved.moments if takes == "pieces" else {}
    if moments:
        for master in _masters(engine):
            torch_optimizer.state[master] = _empty_state(master, saved, group=torch_optimizer.param_groups[0])
    for name, slot in places.items():
        for of in (WEIGHT, *moments):
            values = saved.part(name, of=of, first=slot.first, count=slot.count)
            slot.fill(slot.master if of == WEIGHT else torch_optimizer.state[slot.master][of], values)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            put_frozen(parameter, saved.whole(name), rank=rank)
    for name, buffer in engine.module.named_buffers():
        if name in saved.buffers:
            buffer.copy_(saved.buffers[name])
    round_masters(engine)
    counters = saved.counters
    engine.global_steps = counters.global_steps
    engine.global_samples = counters.global_samples
    engine.skipped_steps = counters.skipped_steps
    if counters.loss_scale is not None:
        put_loss_scale(engine.optimizer, counters.loss_scale)


def named_masters(engine: Any, *, rank: int) -> dict[str, Tensor]:
    """The masters of what is trained, by what names them in the file of their averages: the parameter's name under
    stage 0, the number of the flat group otherwise."""
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat") or hasattr(
        engine.optimizer, "single_partition_of_fp32_groups"
    ):
        return {str(number): flat for number, flat in enumerate(_masters(engine))}
    return {name: slot.master for name, slot in slots(engine, rank=rank).items()}


def put_average(average: WeightAverage, saved: PortableState, *, places: Mapping[str, Slot]) -> None:
    """Load the averages of the weights; a state that has none begins them from its weights, already in place."""
    average.restart()
    if saved.average_updates is None:
        return
    for name, slot in places.items():
        tensor = average.of(slot.master)
        if tensor is not None:
            slot.fill(tensor, saved.part(name, of=AVERAGE, first=slot.first, count=slot.count))
    average.updates = saved.average_updates


def round_masters(engine: Any) -> None:
    """Recompute the forward pass's weights from the masters; collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3, as its own loader does it
        optimizer.checkpoint_event_prologue()  # frees gathered weights
        shards = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
        for half, master in shards:
            half.detach().copy_(master.detach())
        optimizer.checkpoint_event_epilogue()  # gathers again those that are kept whole
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer.update_lp_params()
    else:
        masters = unsharded_masters(optimizer)
        for parameter in engine.module.parameters():
            if id(parameter) in masters:
                parameter.detach().copy_(masters[id(parameter)].detach())


def put_loss_scale(optimizer: Any, saved: LossScale) -> None:
    """Restore a dynamic loss scale, which ZeRO 0 keeps in another attribute."""
    scaler = getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config
    scaler.cur_scale = saved.scale
    scaler.cur_iter = saved.iteration
    scaler.last_overflow_iter = saved.last_overflow
    if saved.hysteresis is not None and hasattr(scaler, "cur_hysteresis"):
        scaler.cur_hysteresis = saved.hysteresis


def _masters(engine: Any) -> list[Tensor]:
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _empty_state(master: Tensor, saved: PortableState, *, group: dict[str, Any]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    if saved.counters.optimizer_step is not None:
        on_device = group.get("fused") or group.get("capturable")
        device = master.device if on_device else "cpu"
        state["step"] = torch.tensor(saved.counters.optimizer_step, dtype=torch.float32, device=device)
    for moment, dtype in saved.moments.items():
        state[moment] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
    return state


def _copied(states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Without memory of the mapped file, which torch would keep."""
    return {
        number: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        for number, state in states.items()
    }
