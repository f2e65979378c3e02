"""Find the master weights and moments in a running DeepSpeed engine, and load saved ones into them.

`slots` maps the pieces of flattened groups (stages 1 and 2) and of parameters (stage 3), so that restoring is one copy
in every stage. DeepSpeed's own setters fail where the world size does not divide a parameter's size, and create no
moments. Relies on attributes of DeepSpeed 0.19's optimizers; does not import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.saved_state.average import AVERAGE, WeightAverage
from pipeline.engine.saved_state.frozen import put_frozen
from pipeline.engine.saved_state.portable import WEIGHT, LossScale, PortableState


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
    found: dict[str, Slot] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue  # frozen: not the optimizer's
        if hasattr(parameter, "ds_id"):  # stage 3: equal pieces, the last of them padded
            flat, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first = rank * size
            count = min(size, parameter.ds_numel - first)
            slot = Slot(optimizer.fp32_partitioned_groups_flat[flat], start, first, count)
        elif (mapping := parameter._hp_mapping) is not None:  # stages 1 and 2
            group, address = mapping.param_group_index, mapping.hp_fragment_address
            flat = optimizer.single_partition_of_fp32_groups[group]
            slot = Slot(flat, address.start, mapping.lp_fragment_address.start, address.numel)
        else:
            continue
        if slot.count > 0:
            found[name] = slot
    return found


def put_state(engine: Any, saved: PortableState, *, rank: int) -> None:
    """Load weights, moments and counters into an engine; collective, as half weights are gathered."""
    places = slots(engine, rank=rank)
    torch_optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)  # inside DeepSpeed's
    torch_optimizer.state.clear()
    if saved.moments:
        for master in _masters(engine):
            torch_optimizer.state[master] = _empty_state(master, saved, group=torch_optimizer.param_groups[0])
    for name, slot in places.items():
        for of in (WEIGHT, *saved.moments):
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


def named_masters(engine: Any) -> dict[str, Tensor]:
    """The masters of what is trained, by what names them in the file of their averages: the flat group's number."""
    return {str(number): flat for number, flat in enumerate(_masters(engine))}


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
    else:
        optimizer.update_lp_params()


def put_loss_scale(optimizer: Any, saved: LossScale) -> None:
    """Restore a dynamic loss scale."""
    scaler = optimizer.loss_scaler
    scaler.cur_scale = saved.scale
    scaler.cur_iter = saved.iteration
    scaler.last_overflow_iter = saved.last_overflow
    if saved.hysteresis is not None:
        scaler.cur_hysteresis = saved.hysteresis


def _masters(engine: Any) -> list[Tensor]:
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def _empty_state(master: Tensor, saved: PortableState, *, group: dict[str, Any]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    if saved.counters.optimizer_step is not None:
        on_device = group.get("fused") or group.get("capturable")
        device = master.device if on_device else "cpu"
        state["step"] = torch.tensor(saved.counters.optimizer_step, dtype=torch.float32, device=device)
    for moment, dtype in saved.moments.items():
        state[moment] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
    return state
