"""Wrap DeepSpeed as an `Engine`: ZeRO 1 to 3, bf16/fp16/fp32, on GPUs (NCCL) and CPUs (gloo).

DeepSpeed owns sharded state, precision, accumulation and, for ZeRO 3 and fp16, clipping and overflow checks. This file
works around DeepSpeed 0.19:
- ZeRO 1 and 2 average gradients by hooks that all-reduce and synchronise with the GPU, and check them tensor by tensor.
  In bf16 and float32 we average, check, clip and apply them (`sharded_step`, `optimizers.flat`).
- Its checkpoints are pickles, which it executes, and load only at the world size and ZeRO stage that wrote them. `load`
  reads any of them as data (`portable`) and copies them into place (`masters`).
- It makes master weights from rounded half-precision ones. We restore their exact values.
- Importing it imports mlflow, and its first use may compile a kernel (`import_deepspeed`).
"""

import contextlib
import functools
import importlib
import logging
import math
import sys
from collections.abc import Callable
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardvit.pipeline.engine.base import DTYPES, Engine, Flags, reduce_flags, step_numbers
from shardvit.pipeline.engine.buckets import cut_buckets, turns_of, units_of
from shardvit.pipeline.engine.saved_state.average import average_file
from shardvit.pipeline.engine.saved_state.frozen import FILE as FROZEN_FILE
from shardvit.pipeline.engine.saved_state.frozen import frozen_weights
from shardvit.pipeline.engine.saved_state.masters import masters_of, put_loss_scale, round_masters, slots_of
from shardvit.pipeline.engine.saved_state.portable import DEEPSPEED_FOLDER, PortableState
from shardvit.pipeline.engine.saved_state.state_files import StateFile, state_file
from shardvit.pipeline.engine.sharded_step import ShardedStep
from shardvit.pipeline.engine.zero_config import bucket_elements, deepspeed_config, overlaps, takes_flat_step
from shardvit.pipeline.optimizers.flat import FlatOptimizer, FlatPiece, GradientJudge
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.stages.train_stage import TrainStage

_LINEAR = nn.functional.linear  # ZeRO 3 replaces it process-wide


def import_deepspeed() -> Any:
    """Import DeepSpeed without three unused costs in every rank: mlflow, for its autotuner (about 1 CPU second);
    Inductor, for Muon's decorated functions (about 1); a search for kernels, which would find only a CPU all-reduce
    (half a minute of compiling, 69 MB of /dev/shm)."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    modules: dict[str, Any] = sys.modules
    modules.setdefault("mlflow", None)  # makes `import mlflow` fail
    compile_now, torch.compile = torch.compile, _compile_when_called
    try:
        import deepspeed

        with contextlib.suppress(ImportError):  # another version
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compile_now
        if modules["mlflow"] is None:
            del modules["mlflow"]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__dict__["__compatible_ops__"] = {}  # kernel name -> available
    return deepspeed


def _compile_when_called(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled = functools.cache(lambda: torch.compile(function, **options))
    return functools.wraps(function)(lambda *inputs, **more: compiled()(*inputs, **more))


class DeepSpeedEngine(Engine):
    """See `pipeline.engine.base.Engine`."""

    backend, kept = "deepspeed", "shard"

    def __init__(
        self, model: nn.Module, *, config: EngineConfig, stage: TrainStage, plan: StagePlan, ranks: Ranks
    ) -> None:
        deepspeed = import_deepspeed()
        optimizer, rank = stage.optimizer, ranks.place.rank
        # Wraps the process group that `Ranks` joined.
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self._scales_loss = config.precision == "fp16"
        exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        frozen = frozen_weights(model)
        deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns that SGD is untested; our tests cover it
        self._judge = GradientJudge(clip_grad_norm=optimizer.clip_grad_norm) if takes_flat_step(config) else None
        flat = self._judge and _flat_optimizer(model, config=config, stage=stage, judge=self._judge, plan=plan)
        engine: Any = deepspeed.initialize(
            model=model,
            optimizer=flat or build_optimizer(model, optimizer),
            config=deepspeed_config(config, optimizer=optimizer, plan=plan),
        )[0]
        deepspeed.utils.logger.setLevel(logging.WARNING)
        masters, slots = masters_of(engine), slots_of(engine, rank=rank)
        self._sharded: ShardedStep | None = None
        if flat:
            number_of = {id(master): number for number, master in enumerate(masters)}
            flat.place(
                {
                    name: FlatPiece(number_of[id(each.master)], each.start, each.count, each.first)
                    for name, each in slots.items()
                }
            )
            self._sharded = ShardedStep(
                engine.optimizer,
                flat,
                units=units_of(model),
                during="backward" if overlaps(config, world_size=plan.world_size) else "after",
                keeps="whole" if config.zero_stage == 1 else "pieces",
                accumulation_steps=plan.accumulation_steps,
            )
        if config.precision != "fp32":
            for name, slot in slots.items():  # exact values, as before rounding
                slot.piece(slot.master).copy_(exact[name].flatten()[slot.first : slot.first + slot.count])
        self._engine = engine
        super().__init__(
            engine.module,
            device=torch.device(engine.device),
            input_dtype=DTYPES[config.precision],
            optimizer=engine.optimizer,
            masters={str(number): master for number, master in enumerate(masters)},
            slots=slots,
            frozen=frozen,
            stage=stage,
            plan=plan,
            ranks=ranks,
        )
        self._rounding_is_due = False

    def forward(self, *inputs: Tensor) -> Tensor:
        self._round_if_due()
        if self._sharded:
            self._sharded.settle_first()
        return self._engine(*inputs)

    @torch.no_grad()
    def predict(self, *inputs: Tensor) -> Tensor:
        return self.forward(*inputs)

    def backward(self, loss: Tensor) -> None:
        if self._sharded:
            self._sharded.begin(last=self._micro_step + 1 == self._accumulation_steps)
        self._engine.backward(loss)
        if self._sharded:
            self._sharded.end()
        self._micro_step += 1
        if self._micro_step < self._accumulation_steps:
            self._engine.step()  # not an accumulation boundary: DeepSpeed only counts

    def _move(self, flags: Flags) -> Tensor:
        if self._judge:
            self._judge.flags = flags
            self._engine.step()
            return self._judge.numbers
        self._engine.step()
        applied, grad_norm = bool(self._engine.was_step_applied()), float(self._engine.get_global_grad_norm())
        return step_numbers(grad_norm=grad_norm, applied=applied, flags=reduce_flags(flags, device=self.device))

    def settle(self) -> None:
        if self._sharded:
            self._sharded.settle()

    def _loss_scale(self) -> float | None:
        return float(self._engine.optimizer.loss_scaler.cur_scale) if self._scales_loss else None

    def snapshot(self) -> tuple[StateFile, ...]:
        self.settle()
        self._round_if_due()
        if self._judge:
            self._engine.skipped_steps += self._judge.take_skipped()  # DeepSpeed has not seen them
        files: list[StateFile] = []

        def collect(state_dict: dict[str, Any], path: str) -> None:
            files.append(state_file(PurePath(path).as_posix(), state_dict))

        writer = self._engine.checkpoint_engine
        self._engine.checkpoint_engine = SimpleNamespace(  # collects what DeepSpeed would write; we commit it ourselves
            makedirs=lambda path, exist_ok=False: None,
            create=lambda info: None,
            save=collect,
            commit=lambda info: True,
            is_decoupled=lambda: False,
        )
        # It would copy two scripts into the folder, bypassing its writer; `shardvit export` replaces them.
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
            collect(self._average.state(), f"{DEEPSPEED_FOLDER}/{average_file(rank)}")
        if self._frozen and rank == 0:
            collect({"weights": self._frozen}, f"{DEEPSPEED_FOLDER}/{FROZEN_FILE}")
        return tuple(files)

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)

    def _finish_load(self, saved: PortableState) -> None:
        self._rounding_is_due = True
        self._round_if_due()
        self._engine.global_steps = saved.global_steps
        self._engine.global_samples = saved.global_samples
        self._engine.skipped_steps = saved.skipped_steps
        if saved.loss_scale is not None:
            put_loss_scale(self._engine.optimizer, saved.loss_scale)

    def _masters_changed(self) -> None:
        # Rounding is collective, so defer it: after an exception on only this rank it would hang.
        self._rounding_is_due = True

    def _round_if_due(self) -> None:
        if self._rounding_is_due:
            self.settle()
            round_masters(self._engine)
            self._rounding_is_due = False

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        self.settle()
        state: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            full = self._frozen.get(name)
            if full is None:
                full = safe_get_full_fp32_param(parameter)
            state[name] = (parameter if full is None else full).detach().to("cpu", torch.float32).clone()
        kept = set(self.module.state_dict())  # without non-persistent buffers
        state.update({name: each.detach().cpu().clone() for name, each in self.module.named_buffers() if name in kept})
        return state

    def close(self) -> None:
        """Detach and empty the engine: its hooks keep it, and so all memory, alive beyond the garbage collector."""
        parameters = list(self.module.parameters())
        if self._sharded:
            self._sharded.close()
        self._engine.destroy()
        for parameter in parameters:
            parameter.grad = None
            for tensor in (parameter, getattr(parameter, "ds_tensor", parameter)):  # ds_tensor: ZeRO 3's local shard
                tensor.data = tensor.data.new_empty(0)
        for part in (self._engine.optimizer, self._engine):
            vars(part).clear()
        # ZeRO 3's linear sums bias gradients in another order, which would change later results in the last bits.
        nn.functional.linear = _LINEAR


def _flat_optimizer(
    model: nn.Module, *, config: EngineConfig, stage: TrainStage, judge: GradientJudge, plan: StagePlan
) -> FlatOptimizer:
    """Build the optimizer of which DeepSpeed shards a flat tensor a bucket: one in all where nothing overlaps, or two
    under Muon."""
    groups, n = parameter_groups(model, stage.optimizer), plan.world_size
    most = bucket_elements(config, world_size=n) if overlaps(config, world_size=n) else math.inf
    buckets = cut_buckets(groups, turns=turns_of(model), most_elements=most)
    return FlatOptimizer(groups, stage.optimizer, buckets=buckets, judge=judge)
