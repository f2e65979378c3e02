"""DeepSpeed behind the `Engine` protocol: ZeRO 1 to 3, bf16/fp16/fp32, on GPUs (NCCL) and CPUs (gloo).

DeepSpeed owns sharded state, precision, accumulation and, under ZeRO 3 and in fp16, clipping and the search for what
is not finite. Where DeepSpeed 0.19 falls short, this file adds:
- ZeRO 1 and 2 look at their gradients tensor by tensor and wait for the GPU several times a step: in bf16 and float32
  we judge, clip and move the flat gradients on the device (`flat_step`, `optimizers.flat`).
- Its checkpoints are pickles, which it executes, and load only at the world size and ZeRO stage that wrote them: `load`
  reads any of them as data (`portable`) and puts them in place (`masters`).
- Master weights are made from rounded half-precision ones: they get their exact values back.
- Its import takes mlflow along, and its first use may compile a kernel of its own (`import_deepspeed`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from pipeline.engine.flat_step import GradientJudge, reduce_at_once
from pipeline.engine.protocol import DTYPES, Flags, StepResult, reduce_flags
from pipeline.engine.saved_state.average import WeightAverage, average_file
from pipeline.engine.saved_state.frozen import FILE as FROZEN_FILE
from pipeline.engine.saved_state.frozen import frozen_weights
from pipeline.engine.saved_state.host_copy import Hold
from pipeline.engine.saved_state.masters import named_masters, put_average, put_state, round_masters, slots
from pipeline.engine.saved_state.portable import DEEPSPEED_FOLDER
from pipeline.engine.saved_state.shared import open_shared
from pipeline.engine.saved_state.state_files import StateFile, state_file
from pipeline.engine.weight_norms import Measure, WeightNorms
from pipeline.engine.zero_config import deepspeed_config, reduces_at_once, takes_flat_step
from pipeline.optimizers.flat import FlatOptimizer
from pipeline.optimizers.optim import build_optimizer, set_lr
from pipeline.optimizers.parameter_groups import parameter_groups
from pipeline.ranks.group import Ranks
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import TrainStage
from pipeline.recipe.stage_plan import StagePlan

_LINEAR = nn.functional.linear  # torch's, which ZeRO 3 replaces in the whole process


def import_deepspeed() -> Any:
    """Import DeepSpeed without three things that it imports or starts in every rank and that nothing here uses.

    mlflow, for its autotuner: about 1 CPU second. Inductor, for the decorated functions of its Muon: about 1. A search
    for kernels: the only one it would use is an all-reduce on CPUs, which compiles for half a minute and leaves 69 MB
    in /dev/shm for each rank."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    modules: dict[str, Any] = sys.modules
    modules.setdefault("mlflow", None)  # Python's mark of "cannot be imported"
    compile_now, torch.compile = torch.compile, _compile_when_called
    try:
        import deepspeed

        with contextlib.suppress(ImportError):  # of another version
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compile_now
        if modules["mlflow"] is None:
            del modules["mlflow"]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__dict__["__compatible_ops__"] = {}  # kernel's name -> whether it can be had
    return deepspeed


def _compile_when_called(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled = functools.cache(lambda: torch.compile(function, **options))
    return functools.wraps(function)(lambda *inputs, **more: compiled()(*inputs, **more))


class DeepSpeedEngine:
    """See `pipeline.engine.protocol.Engine`."""

    def __init__(
        self, model: nn.Module, *, config: EngineConfig, stage: TrainStage, plan: StagePlan, ranks: Ranks
    ) -> None:
        deepspeed = import_deepspeed()
        self.hold = Hold()
        optimizer = stage.optimizer
        # Wraps the process group that `Ranks` has joined.
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self._ranks = ranks
        self._accumulation_steps = plan.accumulation_steps
        self._micro_step = 0
        self.input_dtype = DTYPES[config.precision]
        self._scales_loss = config.precision == "fp16"
        exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self._frozen = frozen_weights(model)
        deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns of SGD, which its tests do not cover and ours do
        self._judge = GradientJudge(clip_grad_norm=optimizer.clip_grad_norm) if takes_flat_step(config) else None
        flat = FlatOptimizer(parameter_groups(model, optimizer), optimizer, judge=self._judge) if self._judge else None
        self._engine: Any = deepspeed.initialize(
            model=model,
            optimizer=flat or build_optimizer(model, optimizer),
            config=deepspeed_config(config, optimizer=optimizer, plan=plan),
        )[0]
        deepspeed.utils.logger.setLevel(logging.WARNING)
        self.device = torch.device(self._engine.device)
        if flat:
            places = slots(self._engine, rank=ranks.place.rank)
            flat.place({name: (each.start, each.count) for name, each in places.items()})
            # It would make anew the views of its flat weights that the parameters are, after each step.
            self._engine.optimizer._update_model_bit16_weights = lambda group_index: None
            if reduces_at_once(config, world_size=plan.world_size):
                reduce_at_once(self._engine.optimizer)
        if config.precision != "fp32":
            self._set_masters(exact)
        self._average = WeightAverage(named_masters(self._engine), config=stage.ema) if stage.ema else None
        self._norms = WeightNorms(self._masters, kept="shard")
        # After masters and averages were exchanged: the forward pass's weights are to be made from the masters again.
        self._rounding_is_due = False

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self._round_if_due()
        return self._engine(*inputs)

    @torch.no_grad()
    def predict(self, *inputs: torch.Tensor) -> torch.Tensor:
        self._round_if_due()
        return self._engine(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)
        self._micro_step += 1
        if self._micro_step < self._accumulation_steps:
            self._engine.step()  # not a boundary: DeepSpeed only counts

    def step(self, *, lr: float, flags: Flags, measure: Measure = "nothing") -> StepResult:
        assert self._micro_step == self._accumulation_steps, "step() before all micro-batches"
        self._micro_step = 0
        self.hold.release()
        set_lr(self._engine.optimizer.param_groups, lr)
        if self._judge:
            self._judge.flags = flags
        with self._norms.around(measure, device=self.device):
            self._engine.step()
        if self._judge:
            result = StepResult(self._judge.numbers)
        else:
            applied, grad_norm = bool(self._engine.was_step_applied()), float(self._engine.get_global_grad_norm())
            raised = reduce_flags(flags, device=self.device)
            result = StepResult.known(grad_norm=grad_norm, applied=applied, flags=raised)
        if self._average:
            self._average.update(applied=result.applied)
        return result

    def measured(self) -> dict[str, float]:
        scale = {"opt/loss_scale": float(self._engine.optimizer.loss_scaler.cur_scale)} if self._scales_loss else {}
        return self._norms.take(self._ranks) | scale

    def _masters(self) -> list[torch.Tensor]:
        places = slots(self._engine, rank=self._ranks.place.rank).values()
        return [each.master.detach().view(-1).narrow(0, each.start, each.count) for each in places]

    def pass_over(self, *, flags: Flags) -> StepResult:
        return StepResult.passed_over(reduce_flags(flags, device=self.device))

    def snapshot(self) -> tuple[StateFile, ...]:
        self._round_if_due()
        if self._judge:
            self._engine.skipped_steps += self._judge.take_skipped()  # DeepSpeed has not seen them
        writer, collector = self._engine.checkpoint_engine, _Collector()
        self._engine.checkpoint_engine = collector
        # It would copy two scripts into the folder, past its own writer; `shardvit export` does what they do.
        self._engine._copy_recovery_script = lambda save_path: None
        try:
            self._engine.save_checkpoint(
                ".", tag=DEEPSPEED_FOLDER, client_state={}, save_latest=False, exclude_frozen_parameters=True
            )
        finally:
            self._engine.checkpoint_engine = writer
            del self._engine._copy_recovery_script
        rank = self._ranks.place.rank
        if self._average:
            collector.save(self._average.state(), f"{DEEPSPEED_FOLDER}/{average_file(rank)}")
        if self._frozen and rank == 0:
            collector.save({"weights": self._frozen}, f"{DEEPSPEED_FOLDER}/{FROZEN_FILE}")
        return tuple(collector.files)

    def load(self, folder: Path, *, written: dict[str, Any]) -> None:
        self.hold.release()
        layout = {key: written[key] for key in ("zero_stage", "processes")}
        saved = open_shared(
            folder, backend="deepspeed", **layout, model=self._engine.module, ranks=self._ranks, asks="own share"
        )
        rank = self._ranks.place.rank
        put_state(self._engine, saved, rank=rank)
        self._frozen = {name: saved.whole(name).clone() for name in self._frozen}
        self._rounding_is_due = False
        if self._average:
            put_average(self._average, saved, places=slots(self._engine, rank=rank))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        assert self._average, "the recipe's stage has no ema"
        self.hold.release()
        self._average.exchange()
        # Not here, as it is collective: an exception of this rank alone would wait for the others.
        self._rounding_is_due = True
        try:
            yield
        finally:
            self._average.exchange()
            self._rounding_is_due = True

    def _round_if_due(self) -> None:
        if self._rounding_is_due:
            round_masters(self._engine)
            self._rounding_is_due = False

    def weights(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        state: dict[str, torch.Tensor] = {}
        for name, parameter in self._engine.module.named_parameters():
            full = self._frozen.get(name)
            if full is None:
                full = safe_get_full_fp32_param(parameter)
            state[name] = (parameter if full is None else full).detach().to("cpu", torch.float32).clone()
        kept = set(self._engine.module.state_dict())  # without non-persistent buffers
        buffers = self._engine.module.named_buffers()
        state.update({name: buffer.detach().cpu().clone() for name, buffer in buffers if name in kept})
        return state

    def close(self) -> None:
        """Detach and empty it: its hooks hold the engine, and with it all memory, out of the collector's sight."""
        parameters = list(self._engine.module.parameters())
        self._engine.destroy()
        for parameter in parameters:
            parameter.grad = None
            for tensor in (parameter, getattr(parameter, "ds_tensor", parameter)):  # the latter: this rank's, in ZeRO 3
                tensor.data = tensor.data.new_empty(0)
        for part in (self._engine.optimizer, self._engine):
            vars(part).clear()
        # ZeRO 3's sums up a bias's gradient in another order: what comes after would differ in the last bits.
        nn.functional.linear = _LINEAR

    def _set_masters(self, exact: dict[str, torch.Tensor]) -> None:
        """Give the master weights the float32 values from before rounding."""
        for name, slot in slots(self._engine, rank=self._ranks.place.rank).items():
            slot.fill(slot.master, exact[name].flatten()[slot.first : slot.first + slot.count])


class _Collector:
    """Replaces DeepSpeed's checkpoint writer during a snapshot: keeps what would be written."""

    def __init__(self) -> None:
        self.files: list[StateFile] = []

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing is written yet."""

    def create(self, info: Any) -> None:
        """Nothing to start."""

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        self.files.append(state_file(PurePath(path).as_posix(), state_dict))

    def commit(self, info: Any) -> bool:
        """The commit is `pipeline.checkpoint.store`'s."""
        return True

    def is_decoupled(self) -> bool:
        return False
