"""`Engine`: the interface and shared code of training backends.

Per optimizer step the loop calls `forward` and `backward` for each micro-batch, then `step`. `deepspeed` (default on
every device) covers ZeRO 1 to 3, and ZeRO 0 through torch's DDP; `accelerate` is for debugging and comparison.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, distributed, nn

from shardvit.pipeline.engine.saved_state.average import WeightAverage
from shardvit.pipeline.engine.saved_state.masters import Slot, put_average, put_state
from shardvit.pipeline.engine.saved_state.portable import PortableState, open_shared
from shardvit.pipeline.engine.saved_state.state_files import StateFile
from shardvit.pipeline.engine.weight_norms import WeightNorms
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import OPTIMIZERS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # by `engine.precision`
Flags = tuple[bool, ...]  # one rank's, or their OR over ranks; opaque to the engine


def step_numbers(*, grad_norm: float, applied: bool, flags: Tensor) -> Tensor:
    """Build `Engine.step`'s result from host values and `reduce_flags`'s tensor."""
    known = torch.tensor([grad_norm, applied], dtype=torch.float32, device=flags.device)
    return torch.cat([known, flags])


def reduce_flags(flags: Flags, *, device: torch.device) -> Tensor:
    """OR the flags over the ranks, if no norm message carries them: float32 [flags] on `device`; collective."""
    raised = torch.zeros(len(flags), device=device)
    for number, flag in enumerate(flags):
        if flag:
            raised[number].fill_(1.0)  # copying a host tensor would synchronise with the device
    distributed.all_reduce(raised, op=distributed.ReduceOp.MAX)
    return raised


class Hold:
    """Makes an engine wait for an ongoing copy before it changes its state."""

    def __init__(self) -> None:
        self._wait: Callable[[], None] | None = None

    def set(self, wait: Callable[[], None]) -> None:
        """Call `wait` once, before the next change; it may return early if it makes the CUDA stream wait."""
        self.release()
        self._wait = wait

    def release(self) -> None:
        """Call before changing anything a snapshot shares."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class Engine(ABC):
    """One model, its optimizer and its state. Cast images to `input_dtype`.

    Args:
        module: the model; its forward pass may be collective (ZeRO 3).
        masters: float32 tensors that the optimizer updates, keyed as in the file of averages.
        slots: this rank's share of each trained parameter within them.
        frozen: exact float32 values, on the CPU, of untrained weights that `module` holds rounded.

    Attributes:
        hold: released before the state a `snapshot` shares changes: in `step`, `load` and `averaged`.
    """

    backend: ClassVar[str]  # as in the recipe
    kept: ClassVar[Literal["whole", "shard"]]  # what each process holds of masters and moments

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
        whole = OPTIMIZERS[stage.optimizer.name].takes == "parameters"
        self._takes: Literal["pieces", "parameters"] = "parameters" if whole else "pieces"
        self._accumulation_steps = plan.accumulation_steps
        self._micro_step = 0  # micro-batches since the last step
        self._ranks = ranks
        self._average = WeightAverage(masters, config=stage.ema) if stage.ema else None
        self._measures = False  # the last step
        self._norms = WeightNorms([each.piece(each.master) for each in slots.values()], kept=self.kept)

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor:
        """Map a task's inputs to outputs, such as images [n, 3, size, size] -> logits [n, classes]."""

    @abstractmethod
    def predict(self, *inputs: Tensor) -> Tensor:
        """`forward` without gradients, in evaluation mode; call equally often on all ranks (ZeRO 3 gathers)."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a micro-batch's mean loss over the accumulation steps."""

    def step(self, *, lr: float, flags: Flags, measure: bool = False) -> Tensor:
        """Average gradients over the ranks, clip, and update unless they are not finite; OR `flags`; collective.
        `measure` (the same on all ranks): `measured` will be asked about this step. Returns float32 [2 + flags] on the
        device, equal on all ranks: the global gradient norm before clipping (not finite when nothing moved), 1 if
        applied else 0, and per flag nonzero if any rank raised it. Reading it synchronises: see `late_metrics`."""
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

    def settle(self) -> None:  # noqa: B027 - nothing is under way where nothing is gathered in the background
        """Call before reading `module`'s weights outside of `forward` and `predict`: after a step they may be on their
        way from other ranks."""

    def pass_over(self, *, flags: Flags) -> Tensor:
        """Skip this step after a rollback: only OR `flags`; collective. The norm is nan."""
        return step_numbers(grad_norm=math.nan, applied=False, flags=reduce_flags(flags, device=self.device))

    def measured(self) -> dict[str, float]:
        """Return the last step's known `opt/` metrics; synchronises with the device; collective."""
        norms, scale = self._norms.take(self._ranks) if self._measures else {}, self._loss_scale()
        return norms | ({} if scale is None else {"opt/loss_scale": scale})

    @abstractmethod
    def _loss_scale(self) -> float | None: ...

    @abstractmethod
    def snapshot(self) -> tuple[StateFile, ...]:
        """Return this rank's files of the state; their tensors share the engine's memory; collective."""

    def load(self, folder: Path, *, written: dict[str, Any]) -> None:
        """Restore a checkpoint of any world size and ZeRO stage, to the last bit; collective. `written`, its identity
        (`checkpoint.identity`), gives `processes` and `zero_stage`. UserError if it is from another model."""
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
        return self.optimizer

    @abstractmethod
    def _finish_load(self, saved: PortableState) -> None:
        """Restore counters and loss scale, and recompute the forward weights from the masters."""

    @abstractmethod
    def _masters_changed(self) -> None:
        """Recompute the forward weights from the masters, perhaps lazily; not collective."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the weights with their moving average for `predict` and `weights`, then back to the last bit, also after
        an exception; do not train or save meanwhile. Not collective."""
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
        """Gather the master weights: float32, on the CPU; collective; complete on rank 0."""

    def close(self) -> None:  # noqa: B027 - nothing to do where nothing else holds the engine
        """Free all memory for the process's next stage; do not use the engine afterwards."""
