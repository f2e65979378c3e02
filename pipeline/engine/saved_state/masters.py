"""Find the master weights and moments in a running engine, and load saved ones into them.

A slot covers a piece of a flattened group (ZeRO 1 and 2), a piece of a parameter (3) or a whole one (0). DeepSpeed's
own setters fail where the world size does not divide a parameter's size, and create no moments. Relies on attributes
of DeepSpeed 0.19's optimizers; does not import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardvit.pipeline.engine.saved_state.average import AVERAGE, WeightAverage
from shardvit.pipeline.engine.saved_state.frozen import put_frozen
from shardvit.pipeline.engine.saved_state.portable import WEIGHT, LossScale, PortableState


@dataclass(frozen=True)
class Slot:
    """Elements `first` to `first + count` of a flattened parameter, at `start` in the flat `master` and its moments."""

    master: Tensor
    start: int
    first: int
    count: int

    def piece(self, flat: Tensor) -> Tensor:
        """View these elements of the master, or of a tensor of its layout."""
        return flat.detach().view(-1).narrow(0, self.start, self.count)


def masters_of(engine: Any) -> list[Tensor]:
    """Return this rank's flat float32 tensors that DeepSpeed's optimizer updates."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def slots_of(engine: Any, *, rank: int) -> dict[str, Slot]:
    """Map trained parameters' names to this rank's share, leaving out those it has none of."""
    optimizer = engine.optimizer
    found: dict[str, Slot] = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
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


def put_state(
    saved: PortableState,
    module: nn.Module,
    slots: Mapping[str, Slot],
    optimizer: torch.optim.Optimizer,
    *,
    masters: Sequence[Tensor],
    takes: Literal["pieces", "parameters"],
    rank: int,
) -> None:
    """Load `masters`, moments, frozen weights and buffers, but not the weights rounded from masters."""
    optimizer.state.clear()
    held = dict[int, dict[str, torch.dtype]]()  # by master
    for name, slot in slots.items() if takes == "pieces" else ():
        held.setdefault(id(slot.master), {}).update(saved.moments_of(name))
    if takes == "parameters":
        assert saved.optimizer, "the recipe allows such an optimizer where parameters are whole"
        optimizer.load_state_dict({**saved.optimizer, "state": _copied(saved.optimizer["state"])})
    else:
        for master in masters:
            if moments := held.get(id(master), saved.moments):
                optimizer.state[master] = _empty_state(master, saved, moments, group=optimizer.param_groups[0])
    for name, slot in slots.items():
        for of in (WEIGHT, *(saved.moments_of(name) if takes == "pieces" else ())):
            values = saved.part(name, of=of, first=slot.first, count=slot.count)
            slot.piece(slot.master if of == WEIGHT else optimizer.state[slot.master][of]).copy_(values)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            put_frozen(parameter, saved.whole(name), rank=rank)
    for name, buffer in module.named_buffers():
        if name in saved.buffers:
            buffer.copy_(saved.buffers[name])


def put_average(average: WeightAverage, saved: PortableState, *, slots: Mapping[str, Slot]) -> None:
    """Load the weight averages, or restart them from the loaded weights if the state has none."""
    average.restart()
    if saved.average_updates is None:
        return
    for name, slot in slots.items():
        values = saved.part(name, of=AVERAGE, first=slot.first, count=slot.count)
        slot.piece(average.of(slot.master)).copy_(values)
    average.updates = saved.average_updates


def round_masters(engine: Any) -> None:
    """Recompute the forward weights from the masters; collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3, as in its own loader
        optimizer.checkpoint_event_prologue()  # frees gathered weights
        shards = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
        for half, master in shards:
            half.detach().copy_(master.detach())
        optimizer.checkpoint_event_epilogue()  # re-gathers persistent parameters
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


def _empty_state(
    master: Tensor, saved: PortableState, moments: Mapping[str, torch.dtype], *, group: dict[str, Any]
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    if saved.optimizer_step is not None and "exp_avg" in moments:  # not for the matrices of Muon
        on_device = group.get("fused") or group.get("capturable")
        device = master.device if on_device else "cpu"
        state["step"] = torch.tensor(saved.optimizer_step, dtype=torch.float32, device=device)
    for moment, dtype in moments.items():
        state[moment] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
    return state


def _copied(states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Copy tensors out of the mapped file, which torch would otherwise keep using."""
    return {
        number: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        for number, state in states.items()
    }
