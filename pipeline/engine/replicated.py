"""Full state on every process (plain data parallelism): float32 weights, their optimizer, their moving average.

Shared by `ddp_engine` (ZeRO 0) and `accelerate_engine`, which differ in forward and backward alone. In half precision
(ZeRO 0) the float32 weights are masters beside the parameters; else they are the parameters. A step is a handful of
operations over lists of tensors. torch's fused optimizers clip and skip on the device; for others (`bf16_moment`, those
of whole parameters) the host reads the norm once a step. Half precision takes 4 bytes a parameter for float32 gradients
while it steps. Not collective: gradients come averaged.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from pipeline.engine.protocol import Flags, StepResult, reduce_flags
from pipeline.engine.saved_state.average import WeightAverage, average_file
from pipeline.engine.saved_state.frozen import frozen_weights
from pipeline.engine.saved_state.host_copy import Hold
from pipeline.engine.saved_state.masters import Slot, put_average
from pipeline.engine.saved_state.portable import LossScale, PortableState
from pipeline.engine.saved_state.shared import open_shared
from pipeline.engine.saved_state.state_files import StateFile, state_file
from pipeline.engine.weight_norms import Measure, WeightNorms
from pipeline.optimizers.optim import build_optimizer, set_lr
from pipeline.ranks.group import Ranks
from pipeline.recipe.optimizer import OptimizerConfig
from pipeline.recipe.stage import EmaConfig
from pipeline.recipe.stage_plan import StagePlan
from pipeline.recipe.vocabulary import OPTIMIZERS

_NORM_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s, and DeepSpeed's


class ReplicatedState:
    """Everything of a model on one device that a step moves and a checkpoint holds.

    Args:
        model: float32, on its device; cast in place to `computes_in`.
        scaler: of dynamic loss scaling (fp16); the engine multiplies its losses by it.

    Attributes:
        hold: see `Engine.hold`.
        takes: what the optimizer takes, see `vocabulary.OptimizerState`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        computes_in: torch.dtype,
        optimizer: OptimizerConfig,
        ema: EmaConfig | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.hold = Hold()
        self._module = model
        self._scaler = scaler
        self._clip_grad_norm = optimizer.clip_grad_norm
        self.takes: Literal["pieces", "parameters"] = OPTIMIZERS[optimizer.name].takes
        self.optimizer: Any = build_optimizer(model, optimizer)
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._frozen: dict[str, Tensor] = {}
        self._masters: dict[str, Tensor] = dict(trained)
        self._rounds = computes_in != torch.float32  # the parameters are rounded copies of the masters
        if self._rounds:
            self._frozen = frozen_weights(model)
            self._masters = {name: each.detach().clone() for name, each in trained.items()}
            by_parameter = {id(trained[name]): master for name, master in self._masters.items()}
            for group in self.optimizer.param_groups:
                group["params"] = [by_parameter[id(each)] for each in group["params"]]
            model.to(computes_in)
        self._parameters: list[Tensor] = [*trained.values()]
        # torch's own mark of an optimizer that reads `grad_scale` and `found_inf` on the device.
        self._skips_on_device = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        self._average = WeightAverage(self._masters, config=ema) if ema else None

    def step(self, *, lr: float, flags: Tensor) -> StepResult:
        """Clip and move the weights unless the averaged gradients are not finite; `flags`: from `reduce_flags`."""
        self.hold.release()
        set_lr(self.optimizer.param_groups, lr)
        gradients = self._float_gradients()
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = get_total_norm(gradients, foreach=True)
        finite = torch.isfinite(norm)
        factor = (norm + _NORM_EPS).div(self._clip_grad_norm or torch.inf).clamp(min=1.0)
        if self._skips_on_device:
            self.optimizer.grad_scale, self.optimizer.found_inf = factor, (~finite).float()
            self.optimizer.step()
        elif bool(finite):
            torch._foreach_div_(gradients, factor)
            self.optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
        if self._average:
            self._average.update(applied=finite.float())
        if self._rounds:
            for master in self._masters.values():
                master.grad = None
        self.round()
        return StepResult(torch.cat([torch.stack([norm, finite.float()]), flags]))

    def masters(self) -> list[Tensor]:
        """Trained float32 weights; the same tensors for the engine's lifetime."""
        return list(self._masters.values())

    @property
    def loss_scale(self) -> float | None:
        """Loss scale; None without one. Waits for the device."""
        return float(self._scaler.get_scale()) if self._scaler is not None and self._scaler.is_enabled() else None

    def clear_gradients(self, *, keep_memory: bool) -> None:
        """Before the next forward pass; `keep_memory`: they are zeros then, where they were."""
        if keep_memory:
            torch._foreach_zero_([each.grad for each in self._parameters if each.grad is not None])
            return
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _float_gradients(self) -> list[Tensor]:
        """Gradients of the float32 weights, where the optimizer reads them."""
        gradients = [parameter.grad for parameter in self._parameters]
        assert all(each is not None for each in gradients), "a trained parameter has no part in the loss"
        found: list[Tensor] = gradients  # pyright: ignore[reportAssignmentType]
        if not self._rounds:
            return found
        masters = list(self._masters.values())
        sizes = [each.numel() for each in masters]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=masters[0].device)
        views = [piece.view_as(master) for piece, master in zip(flat.split(sizes), masters, strict=True)]
        torch._foreach_copy_(views, found)
        for master, view in zip(masters, views, strict=True):
            master.grad = view
        return views

    @torch.no_grad()
    def round(self) -> None:
        """Recompute the forward pass's weights from the masters."""
        if self._rounds:
            torch._foreach_copy_(self._parameters, list(self._masters.values()))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """See `Engine.averaged`."""
        assert self._average, "the recipe's stage has no ema"
        self.hold.release()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        assert self._average
        self._average.exchange()
        self.round()

    def weights(self) -> dict[str, Tensor]:
        """See `Engine.weights`."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._whole().items()}

    def files(self, path: str) -> tuple[StateFile, ...]:
        """All of it for a checkpoint, `path` and perhaps its average's file, sharing memory."""
        state = {
            "model": self._whole(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
        }
        average = (state_file(average_file(0), self._average.state()),) if self._average else ()
        return (state_file(path, state), *average)

    @torch.no_grad()
    def put(self, saved: PortableState) -> None:
        """Restore a state of any engine, to the last bit."""
        self.hold.release()
        self.optimizer.state.clear()
        if self.takes == "parameters":
            assert saved.optimizer, "the recipe allows such an optimizer where parameters are whole"
            self.optimizer.load_state_dict({**saved.optimizer, "state": _copied(saved.optimizer["state"])})
        for name, master in self._masters.items():
            master.copy_(saved.whole(name))
            if self.takes == "pieces" and saved.moments:
                self.optimizer.state[master] = self._moments(saved, name=name, master=master)
        self._frozen = {name: saved.whole(name).clone() for name in self._frozen}
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad:
                parameter.copy_(saved.whole(name))
        for name, buffer in self._module.named_buffers():
            if name in saved.buffers:
                buffer.copy_(saved.buffers[name])
        self.round()
        if self._scaler is not None and saved.counters.loss_scale is not None:
            self._scaler.load_state_dict(_scaler_state(saved.counters.loss_scale, like=self._scaler))
        if self._average:
            places = {name: Slot(master, 0, 0, master.numel()) for name, master in self._masters.items()}
            put_average(self._average, saved, places=places)

    def _moments(self, saved: PortableState, *, name: str, master: Tensor) -> dict[str, Tensor]:
        state = {moment: saved.whole(name, of=moment).to(master.device, copy=True) for moment in saved.moments}
        if saved.counters.optimizer_step is not None:
            device = master.device if self._skips_on_device else "cpu"
            state["step"] = torch.tensor(saved.counters.optimizer_step, dtype=torch.float32, device=device)
        return state

    def _whole(self) -> dict[str, Tensor]:
        """The model's state with its exact weights."""
        return {**self._module.state_dict(), **self._masters, **self._frozen}


class ReplicatedEngine(ABC):
    """Base of the engines that keep everything whole: all of `Engine` but the forward and backward passes.

    Args:
        module: the model itself; `state` is over it.
        device: of both.

    Attributes:
        file, backend: of their checkpoints.
    """

    file: ClassVar[str]
    backend: ClassVar[str]

    def __init__(
        self, module: nn.Module, *, state: ReplicatedState, device: torch.device, plan: StagePlan, ranks: Ranks
    ) -> None:
        self.device = device
        self._module = module
        self._state = state
        self._norms = WeightNorms(state.masters, kept="whole")
        self._ranks = ranks
        self._accumulation_steps = plan.accumulation_steps
        self._micro_step = 0

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def hold(self) -> Hold:
        return self._state.hold

    def step(self, *, lr: float, flags: Flags, measure: Measure = "nothing") -> StepResult:
        assert self._micro_step == self._accumulation_steps, "step() before all micro-batches"
        self._micro_step = 0
        with self._norms.around(measure, device=self.device):
            result = self._state.step(lr=lr, flags=reduce_flags(flags, device=self.device))
        self._clear_gradients()
        return result

    def measured(self) -> dict[str, float]:
        scale = self._state.loss_scale
        return self._norms.take(self._ranks) | ({} if scale is None else {"opt/loss_scale": scale})

    @abstractmethod
    def _clear_gradients(self) -> None: ...

    def pass_over(self, *, flags: Flags) -> StepResult:
        return StepResult.passed_over(reduce_flags(flags, device=self.device))

    def snapshot(self) -> tuple[StateFile, ...]:
        return self._state.files(self.file) if self._ranks.place.is_main else ()

    def load(self, folder: Path, *, written: dict[str, Any]) -> None:
        layout = {key: written[key] for key in ("zero_stage", "processes")}
        of_all: dict[str, Any] = {"backend": self.backend, "asks": "alike", "takes": self._state.takes}
        self._state.put(open_shared(folder, **of_all, **layout, model=self._module, ranks=self._ranks))

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        return self._state.averaged()

    def close(self) -> None:  # noqa: B027 - nothing to do
        """Nothing holds it but who uses it."""

    def weights(self) -> dict[str, Tensor]:
        return self._state.weights()


def _scaler_state(saved: LossScale, *, like: torch.amp.GradScaler) -> dict[str, Any]:
    steps_since = saved.iteration - saved.last_overflow - 1
    return {**like.state_dict(), "scale": saved.scale, "_growth_tracker": steps_since % like.get_growth_interval()}


def _copied(states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Without memory of the mapped file, which torch would keep."""
    return {
        number: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        for number, state in states.items()
    }
