"""`Engine`: a training backend as the loop, evaluation and checkpoints see it, and what all backends share.

`deepspeed` (the default on every device) shards and checkpoints, but for ZeRO 0, which is torch's DDP; `accelerate` is
plain data parallelism, for debugging and comparison. Per optimizer step the loop calls `forward` and `backward` for
each micro-batch, then `step`.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, distributed, nn

from pipeline.engine.saved_state.average import WeightAverage
from pipeline.engine.saved_state.masters import Slot, put_average, put_state
from pipeline.engine.saved_state.portable import PortableState, open_shared
from pipeline.engine.saved_state.state_files import StateFile
from pipeline.engine.weight_norms import WeightNorms
from pipeline.ranks.group import Ranks
from pipeline.recipe.stage import TrainStage
from pipeline.recipe.stage_plan import StagePlan
from pipeline.recipe.vocabulary import OPTIMIZERS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # of `engine.precision`
Flags = tuple[bool, ...]  # one rank's, or of any rank; the engine reduces them and need not know what they mean


def step_numbers(*, grad_norm: float, applied: bool, flags: Tensor) -> Tensor:
    """The numbers of a step (`Engine.step`) that the host knows already; `flags`: from `reduce_flags`."""
    known = torch.tensor([grad_norm, applied], dtype=torch.float32, device=flags.device)
    return torch.cat([known, flags])


def reduce_flags(flags: Flags, *, device: torch.device) -> Tensor:
    """Float32 [flags] on `device`: 1 for each flag that any rank raised; collective. For steps whose gradient norm is
    sent in no message of ours that the flags could travel in."""
    raised = torch.zeros(len(flags), device=device)
    for number, flag in enumerate(flags):
        if flag:
            raised[number].fill_(1.0)  # a copy from the host would wait for the device
    distributed.all_reduce(raised, op=distributed.ReduceOp.MAX)
    return raised


class Hold:
    """Makes an engine wait for a copy before it changes its state."""

    def __init__(self) -> None:
        self._wait: Callable[[], None] | None = None

    def set(self, wait: Callable[[], None]) -> None:
        """`wait` is called once, before the next change; it may be quick, if it makes a stream wait."""
        self.release()
        self._wait = wait

    def release(self) -> None:
        """Call before anything that a snapshot holds changes."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class Engine(ABC):
    """One model, its optimizer and its state.

    Args:
        masters: the float32 tensors that the optimizer moves, under the names of the file of their averages.
        slots: where this rank's share of each trained parameter lies in them.
        frozen: exact float32 values, on the CPU, of what is not trained and rounded in `module`.

    Attributes:
        module: the model; its forward pass may be collective (ZeRO 3).
        device: of images and labels.
        input_dtype: images are cast to it.
        hold: released before anything changes that `snapshot` gave: in `step`, `load` and `averaged`.
    """

    backend: ClassVar[str]  # the recipe's
    kept: ClassVar[Literal["whole", "shard"]]  # by each process, of masters and moments

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        input_dtype: torch.dtype,
        optimizer: torch.optim.Optimizer,
        masters: Mapping[str, Tensor],
        slots: Mapping[str, Slot],
        frozen: dict[str, Tensor],
        stage: TrainStage,
        plan: StagePlan,
        ranks: Ranks,
    ) -> None:
        self.module, self.device, self.input_dtype = module, device, input_dtype
        self.hold = Hold()
        self.optimizer: Any = optimizer
        self._masters, self._slots, self._frozen = masters, slots, frozen
        self._takes: Literal["pieces", "parameters"] = OPTIMIZERS[stage.optimizer.name].takes
        self._accumulation_steps = plan.accumulation_steps
        self._micro_step = 0  # micro-batches since the last step
        self._ranks = ranks
        self._average = WeightAverage(masters, config=stage.ema) if stage.ema else None
        self._measures = False  # the last step
        self._norms = WeightNorms([each.piece(each.master) for each in slots.values()], kept=self.kept)

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """The outputs for a task's inputs, such as images [n, 3, size, size] -> logits [n, classes]."""

    @abstractmethod
    def predict(self, *inputs: Tensor) -> Tensor:
        """Outputs in evaluation mode, without gradients; call equally often on all ranks (ZeRO 3 gathers)."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's mean loss, divided by the accumulation steps."""

    def step(self, *, lr: float, flags: Flags, measure: bool = False) -> Tensor:
        """Average over the ranks, clip, and move the weights, unless the gradient is not finite; reduce `flags` over
        the ranks; collective. `measure`: `measured` will be asked about this step; the same on all ranks.

        Returns float32 [2 + flags], the same on all ranks, still on the device: the global gradient norm before
        clipping (not finite when nothing moved); 1 if the step was applied, else 0; for each flag, not 0 if any rank
        raised it. Reading them waits for the device, so the loop does that a step later (`late_metrics`).
        """
        assert self._micro_step == self._accumulation_steps, "step() before all micro-batches"
        self._micro_step, self._measures = 0, measure
        self.hold.release()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        with self._norms.around(device=self.device) if measure else contextlib.nullcontext():
            numbers = self._move(flags)
        if self._average:
            self._average.update(applied=numbers[1])
        return numbers

    @abstractmethod
    def _move(self, flags: Flags) -> Tensor: ...

    def pass_over(self, *, flags: Flags) -> Tensor:
        """Skip this step after a rollback: only reduce `flags`; collective. The norm is nan."""
        return step_numbers(grad_norm=math.nan, applied=False, flags=reduce_flags(flags, device=self.device))

    def measured(self) -> dict[str, float]:
        """The last step's `opt/` metrics where they are known; waits for the device; collective."""
        norms, scale = self._norms.take(self._ranks) if self._measures else {}, self._loss_scale()
        return norms | ({} if scale is None else {"opt/loss_scale": scale})

    @abstractmethod
    def _loss_scale(self) -> float | None: ...

    @abstractmethod
    def snapshot(self) -> tuple[StateFile, ...]:
        """This rank's files of the state, sharing the engine's memory; collective."""

    def load(self, folder: Path, *, written: dict[str, Any]) -> None:
        """Restore, to the last bit, a checkpoint of any world size and ZeRO stage; collective.

        `written` is its identity (`checkpoint.identity.checkpoint_identity`): `processes` and `zero_stage` say how to
        read it; backend and precision are this engine's. UserError: it is of another model.
        """
        self.hold.release()
        written = {**written, "backend": self.backend}
        saved = open_shared(
            folder, written=written, model=self.module, ranks=self._ranks, keeps=self.kept, takes=self._takes
        )
        rank, masters = self._ranks.place.rank, list(self._masters.values())
        put_state(
            saved, self.module, self._slots, self._inner_optimizer(), masters=masters, takes=self._takes, rank=rank
        )
        self._frozen = {name: saved.whole(name).clone() for name in self._frozen}
        self._finish_load(saved)
        if self._average:
            put_average(self._average, saved, slots=self._slots)

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        """Torch's, which holds the moments."""
        return self.optimizer

    @abstractmethod
    def _finish_load(self, saved: PortableState) -> None:
        """Restore counters and loss scale, and make the forward pass's weights from the masters."""

    @abstractmethod
    def _masters_changed(self) -> None:
        """Have the forward pass's weights made from the masters; not collective."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the weights with their moving average, for `predict` and `weights`; do not train or save meanwhile.
        Afterwards all is as before to the last bit, also after an exception. Not collective."""
        assert self._average, "the recipe's stage has no ema"
        self.hold.release()
        self._average.exchange()
        self._masters_changed()
        try:
            yield
        finally:
            self._average.exchange()
            self._masters_changed()

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """All weights in float32 on the CPU, from the master copy; collective; complete on rank 0."""

    def close(self) -> None:  # noqa: B027 - nothing to do where nothing else holds the engine
        """Let go of all memory: the process continues with another stage. Nothing of the engine is used after that."""
