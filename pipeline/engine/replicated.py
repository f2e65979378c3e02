"""Keep the full state on every process: float32 weights, optimizer, average (ZeRO 0 and accelerate).

In half precision (ZeRO 0) float32 masters exist next to the parameters, and a step takes 4 more bytes a parameter for
float32 gradients; otherwise the parameters are the masters. A step is a handful of foreach operations. Optimizers
clip and skip on the device; only for one of the user's own that cannot the host reads the norm.
"""

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from shardvit.model.without_compiler import hidden
from shardvit.pipeline.engine.base import DTYPES, Engine, Flags, reduce_flags
from shardvit.pipeline.engine.saved_state.average import average_file
from shardvit.pipeline.engine.saved_state.frozen import frozen_weights
from shardvit.pipeline.engine.saved_state.masters import Slot
from shardvit.pipeline.engine.saved_state.portable import ACCELERATE_FILE, DDP_FILE, PortableState
from shardvit.pipeline.engine.saved_state.state_files import StateFile, state_file
from shardvit.pipeline.engine.zero_config import bucket_elements
from shardvit.pipeline.optimizers.optim import build_optimizer
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.stages.train_stage import TrainStage

_NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_ and DeepSpeed
_GROWTH_INTERVAL = 1000  # steps until the loss scale doubles, as in DeepSpeed's ZeRO 1 to 3
_MIB = 1 << 20
_NEVER = 1_000_000_000
_MIXED_PRECISION = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}  # accelerate's names


class ReplicatedEngine(Engine):
    """See `pipeline.engine.base.Engine`. Moves the float32 `model` to the device and casts it in place to
    `computes_in`. `wrap` returns the `InOrder` model itself or a DDP around it; `scaler` is for fp16."""

    file: ClassVar[str]  # its name in a checkpoint
    kept = "whole"

    def __init__(
        self,
        model: nn.Module,
        *,
        wrap: Callable[[nn.Module], nn.Module],
        computes_in: torch.dtype,
        scaler: torch.amp.GradScaler | None,
        stage: TrainStage,
        plan: StagePlan,
        ranks: Ranks,
    ) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        model = model.to(device)
        optimizer: Any = build_optimizer(model, stage.optimizer)
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        masters, frozen = dict[str, Tensor](trained), dict[str, Tensor]()
        self._rounds = computes_in != torch.float32  # parameters are rounded copies of the masters
        if self._rounds:
            frozen = frozen_weights(model)
            masters = {name: each.detach().clone() for name, each in trained.items()}
            by_parameter = {id(trained[name]): master for name, master in masters.items()}
            for group in optimizer.param_groups:
                group["params"] = [by_parameter[id(each)] for each in group["params"]]
            model.to(computes_in)
        self._plain: nn.Module = InOrder(model)
        wrapped = wrap(self._plain)  # may move the parameters' data
        self._ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        super().__init__(
            model,
            device=device,
            input_dtype=computes_in,
            optimizer=optimizer,
            masters=masters,
            slots={name: Slot(master, 0, 0, master.numel()) for name, master in masters.items()},
            frozen=frozen,
            stage=stage,
            plan=plan,
            ranks=ranks,
        )
        self._parameters: list[Tensor] = [*trained.values()]
        self._scaler, self._clip_grad_norm = scaler, stage.optimizer.clip_grad_norm
        # torch marks optimizers that read `grad_scale` and `found_inf` on the device this way.
        self._skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        if self._ddp is not None:
            # DDP reads its timers in the first ten steps and then at this rate, synchronising with the device.
            self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)
            settle_buckets(self._ddp)
        self._clear_gradients()

    def forward(self, *inputs: Tensor) -> Tensor:
        """DDP decides here whether the backward pass will reduce over the ranks."""
        if self._ddp is None:
            return self._plain(*inputs)
        last = self._micro_step + 1 == self._accumulation_steps
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            return self._ddp(*inputs)

    @torch.no_grad()
    def predict(self, *inputs: Tensor) -> Tensor:
        return self._plain(*inputs)

    def backward(self, loss: Tensor) -> None:
        self._micro_step += 1
        loss = loss / self._accumulation_steps
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _move(self, flags: Flags) -> Tensor:
        raised = reduce_flags(flags, device=self.device)
        gradients, optimizer = self._float_gradients(), self.optimizer
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        norm = get_total_norm(gradients, foreach=True)
        finite = torch.isfinite(norm)
        factor = (norm + _NORM_EPS).div(self._clip_grad_norm or torch.inf).clamp(min=1.0)
        if self._skips_on_device:
            optimizer.grad_scale, optimizer.found_inf = factor, (~finite).float()
            optimizer.step()
        elif bool(finite):
            torch._foreach_div_(gradients, factor)
            optimizer.step()
        if self._scaler is not None:
            self._scaler.update()
        if self._rounds:
            for master in self._masters.values():
                master.grad = None
        self._masters_changed()
        self._clear_gradients()
        return torch.cat([torch.stack([norm, finite.float()]), raised])

    def _loss_scale(self) -> float | None:
        return float(self._scaler.get_scale()) if self._scaler is not None and self._scaler.is_enabled() else None

    def _clear_gradients(self) -> None:
        """Zero accumulated gradients in DDP's buckets; drop a single micro-batch's, which saves an operation a
        parameter. A run never switches: the two divide by three or more ranks differently, in the last bits."""
        if self._ddp is not None and self._accumulation_steps > 1:
            torch._foreach_zero_([each.grad for each in self._parameters if each.grad is not None])
            return
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _float_gradients(self) -> list[Tensor]:
        """Return the float32 gradients, placed where the optimizer reads them."""
        gradients = [parameter.grad for parameter in self._parameters]
        assert all(each is not None for each in gradients), "a trained parameter has no part in the loss"
        found: list[Tensor] = gradients  # pyright: ignore[reportAssignmentType]
        if not self._rounds:
            return found
        masters = list(self._masters.values())
        sizes = [each.numel() for each in masters]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
        views = [piece.view_as(master) for piece, master in zip(flat.split(sizes), masters, strict=True)]
        torch._foreach_copy_(views, found)
        for master, view in zip(masters, views, strict=True):
            master.grad = view
        return views

    @torch.no_grad()
    def _masters_changed(self) -> None:
        if self._rounds:
            torch._foreach_copy_(self._parameters, list(self._masters.values()))

    def _whole(self) -> dict[str, Tensor]:
        return {**self.module.state_dict(), **self._masters, **self._frozen}

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._whole().items()}

    def snapshot(self) -> tuple[StateFile, ...]:
        if not self._ranks.place.is_main:
            return ()
        state = {
            "model": self._whole(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
        }
        average = (state_file(average_file(0), self._average.state()),) if self._average else ()
        return (state_file(self.file, state), *average)

    def _finish_load(self, saved: PortableState) -> None:
        self._masters_changed()
        scale = saved.loss_scale
        if self._scaler is not None and scale is not None:
            steps_since = (scale.iteration - scale.last_overflow - 1) % self._scaler.get_growth_interval()
            state = {**self._scaler.state_dict(), "scale": scale.scale, "_growth_tracker": steps_since}
            self._scaler.load_state_dict(state)


class DdpEngine(ReplicatedEngine):
    """ZeRO 0 by torch's DDP, with the arithmetic of ZeRO 1 to 3: weights and gradients in the recipe's precision over
    float32 masters. About 20 operations a step; DeepSpeed's stage 0 takes 8,687 for 24 layers."""

    file, backend = DDP_FILE, "deepspeed"

    def __init__(
        self, model: nn.Module, *, config: EngineConfig, stage: TrainStage, plan: StagePlan, ranks: Ranks
    ) -> None:
        dtype = DTYPES[config.precision]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        fp16 = config.precision == "fp16"
        scaler = torch.amp.GradScaler(device, growth_interval=_GROWTH_INTERVAL) if fp16 else None

        def wrap(plain: nn.Module) -> nn.Module:
            if ranks.place.world_size == 1:
                return plain
            bucket_mib = bucket_elements(config, world_size=ranks.place.world_size) * dtype.itemsize / _MIB
            return DistributedDataParallel(plain, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)

        super().__init__(model, wrap=wrap, computes_in=dtype, scaler=scaler, stage=stage, plan=plan, ranks=ranks)


class AccelerateEngine(ReplicatedEngine):
    """accelerate's DDP, for debugging and comparison: half precision is autocast over float32 weights. Avoids its
    DeepSpeed plugin, which on a CPU silently falls back to DDP, and hides the checkpoint."""

    file, backend = ACCELERATE_FILE, "accelerate"

    def __init__(
        self, model: nn.Module, *, config: EngineConfig, stage: TrainStage, plan: StagePlan, ranks: Ranks
    ) -> None:
        with hidden("wandb", "tensorboard", "tensorboardX"):
            from accelerate import Accelerator
            from accelerate.utils import DistributedDataParallelKwargs

        accelerator: Any = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision=_MIXED_PRECISION[config.precision],
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
        if accelerator.num_processes != ranks.place.world_size:
            raise RuntimeError(f"accelerate sees {accelerator.num_processes} of {ranks.place.world_size} processes")
        super().__init__(
            model,
            wrap=accelerator.prepare,
            computes_in=torch.float32,
            scaler=accelerator.scaler,
            stage=stage,
            plan=plan,
            ranks=ranks,
        )


class InOrder(nn.Module):
    """Wraps a model for DDP: called with None, it touches every trained parameter in order. A DDP that knows its GPU,
    such as accelerate's, cannot be called without inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Buffers are constant, and DDP would broadcast them in each forward pass.
        buffers = [f"model.{name}" for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, buffers)

    def forward(self, *inputs: Any) -> Tensor:
        if inputs[0] is not None:
            return self.model(*inputs)
        return torch.stack([each.reshape(-1)[0] for each in self.model.parameters() if each.requires_grad])


def settle_buckets(ddp: nn.Module) -> None:
    """Make DDP cut its buckets before the first step; collective, reduces zeros once, leaves zero gradients. By itself
    it cuts them after the first backward pass, in gradient order. A gradient's place in a message decides in which
    order three or more ranks are summed, so a resumed run's first step would differ in the last bits."""
    (0.0 * ddp(None).float()).sum().backward()
