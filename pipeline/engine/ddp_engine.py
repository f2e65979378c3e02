"""ZeRO 0: nothing is sharded; torch's DistributedDataParallel averages the gradients while they are computed.

Weights and gradients are in the recipe's precision over float32 masters (`replicated`), so that it computes what ZeRO 1
to 3 compute, in about 20 operations a step where DeepSpeed's stage 0 takes 8,687 for 24 layers. fp16 scales its loss by
torch's GradScaler.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.engine.protocol import DTYPES
from pipeline.engine.replicated import ReplicatedEngine, ReplicatedState
from pipeline.engine.saved_state.portable import DDP_FILE
from pipeline.ranks.group import Ranks
from pipeline.recipe.schema import EngineConfig
from pipeline.recipe.stage import TrainStage
from pipeline.recipe.stage_plan import StagePlan

_GROWTH_INTERVAL = 1000  # steps after which the loss scale doubles, as DeepSpeed's under ZeRO 1 to 3
_MIB = 1 << 20
_NEVER = 1_000_000_000


class DdpEngine(ReplicatedEngine):
    """See `pipeline.engine.protocol.Engine`."""

    file, backend = DDP_FILE, "deepspeed"

    def __init__(
        self, model: nn.Module, *, config: EngineConfig, stage: TrainStage, plan: StagePlan, ranks: Ranks
    ) -> None:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.input_dtype = DTYPES[config.precision]
        self._scaler = None
        if config.precision == "fp16":
            self._scaler = torch.amp.GradScaler(device.type, growth_interval=_GROWTH_INTERVAL)
        model = model.to(device)
        state = ReplicatedState(
            model, computes_in=self.input_dtype, optimizer=stage.optimizer, ema=stage.ema, scaler=self._scaler
        )
        super().__init__(model, state=state, device=device, plan=plan, ranks=ranks)
        self._ddp = None
        if ranks.place.world_size > 1:
            bucket_bytes = config.bucket_elements * self.input_dtype.itemsize
            self._ddp = DistributedDataParallel(
                InOrder(self._module), bucket_cap_mb=bucket_bytes / _MIB, gradient_as_bucket_view=True
            )
            # It reads its timers in the first ten steps and then at this rate, waiting for the device.
            self._ddp._set_ddp_runtime_logging_sample_rate(_NEVER)
            settle_buckets(self._ddp)
        self._clear_gradients()

    def forward(self, *inputs: Tensor) -> Tensor:
        """DDP decides here whether the backward pass will reduce over the ranks."""
        self._micro_step += 1
        if self._ddp is None:
            return self._module(*inputs)
        last = self._micro_step == self._accumulation_steps
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            return self._ddp(*inputs)

    @torch.no_grad()
    def predict(self, *inputs: Tensor) -> Tensor:
        return self._module(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss = loss / self._accumulation_steps
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _clear_gradients(self) -> None:
        """Accumulated gradients are added up where they are sent from; a single one is copied there, which takes one
        operation of a parameter less than adding it to zeros. The same way from the first step on: the two divide by
        the number of ranks in different ways, of which three or more tell the last bits."""
        self._state.clear_gradients(keep_memory=self._ddp is not None and self._accumulation_steps > 1)


class InOrder(nn.Module):
    """A model for DDP to wrap: called without inputs, it touches every trained parameter in their order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # None of them moves, and DDP would send them in each forward pass.
        buffers = [f"model.{name}" for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, buffers)

    def forward(self, *inputs: Tensor) -> Tensor:
        if inputs:
            return self.model(*inputs)
        return torch.stack([each.reshape(-1)[0] for each in self.model.parameters() if each.requires_grad])


def settle_buckets(ddp: nn.Module) -> None:
    """Let DDP cut its buckets before the first step; collective, sends zeros once.

    DDP begins with one bucket and cuts it up after the first backward pass, in the order of the gradients. The place of
    a gradient in a message decides in which order three or more ranks' are added, so that a resumed run's first step
    would differ in the last bits from the same step of a run that went through. Leaves zeros as gradients.
    """
    (0.0 * ddp().float()).sum().backward()
