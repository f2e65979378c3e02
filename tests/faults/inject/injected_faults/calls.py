"""Points at calls of the product's functions, which are wrapped when the modules that define them are imported.

The step at points of the loop is the number of steps that were done before the one in progress.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from injected_faults.fault import Fault, planned, reach

POINTS = {
    "between_steps",
    "forward",  # in the middle of the model
    "backward",  # at the beginning of autograd's work
    "optimizer",  # gradients are reduced, torch's optimizer is about to move the weights
    "evaluation",
    "save.begin",
    "save.snapshot",  # this rank has its copies
    "save.written",  # this rank's files are written and flushed
    "swap_head",
    "batch",  # a training batch is read
}
_step = 0


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs `patches[name]` on a module when it has been imported."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches
        self._loaders: dict[str, Any] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            self._loaders[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        self._loaders[name].exec_module(module)
        self._patches[name](module)


def install() -> None:
    """Wrap what the points need."""
    sys.meta_path.insert(
        0,
        _AfterImport(
            {
                "shardvit.pipeline.checkpoint.train_state": _patch_state,
                "shardvit.pipeline.engine.deepspeed_engine": lambda module: _patch_engine(module.DeepSpeedEngine),
                "shardvit.pipeline.engine.replicated": lambda module: _patch_engine(module.ReplicatedEngine),
                "shardvit.pipeline.checkpoint.saver": _patch_saver,
                "shardvit.model.layers.head": _patch_head,
                "shardvit.data_shards.loading.assemble": _patch_assemble,
            }
        ),
    )


def _patch_state(module: ModuleType) -> None:
    seed_step = module.seed_step

    def seed_and_reach(seed: int, *, step: int, rank: int) -> None:
        global _step
        _step = step
        reach("between_steps", step=step)
        seed_step(seed, step=step, rank=rank)

    module.seed_step = seed_and_reach  # pyright: ignore[reportAttributeAccessIssue]


def _patch_engine(engine: Any) -> None:
    forward, backward, step, predict = engine.forward, engine.backward, engine.step, engine.predict

    def faulty_forward(self: Any, *inputs: Any) -> Any:
        for fault in _due("forward"):
            modules = list(self.module.modules())
            _strike_once_in(modules[len(modules) // 2], fault)
        return forward(self, *inputs)

    def faulty_backward(self: Any, loss: Any) -> None:
        for fault in _due("backward"):
            loss.register_hook(functools.partial(_strike_gradient, fault))
        backward(self, loss)

    def faulty_step(self: Any, **how: Any) -> Any:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        due = _due("optimizer")
        handles = [register_optimizer_step_pre_hook(lambda *_, fault=fault: fault.strike()) for fault in due]
        try:
            return step(self, **how)
        finally:
            for handle in handles:
                handle.remove()

    def faulty_predict(self: Any, *inputs: Any) -> Any:
        reach("evaluation", step=_step + 1)
        return predict(self, *inputs)

    engine.forward, engine.backward, engine.step, engine.predict = (
        faulty_forward,
        faulty_backward,
        faulty_step,
        faulty_predict,
    )
    if hasattr(engine, "snapshot"):
        _after(engine, "snapshot", "save.snapshot")


def _due(point: str) -> list[Fault]:
    return [fault for fault in planned() if fault.point == point and fault.is_due(step=_step)]


def _strike_once_in(module: Any, fault: Fault) -> None:
    def hook(*_: Any) -> None:
        handle.remove()
        fault.strike()

    handle = module.register_forward_hook(hook)


def _strike_gradient(fault: Fault, gradient: Any) -> Any:
    if fault.action == "nan":
        return gradient * float("nan")
    fault.strike()
    return None


def _patch_saver(module: ModuleType) -> None:
    save = module.CheckpointSaver.save

    def faulty_save(self: Any, state: Any, *rest: Any, **others: Any) -> Any:
        reach("save.begin", step=state.step)
        return save(self, state, *rest, **others)

    run = module._Writing.run

    def faulty_run(self: Any) -> None:
        run(self)
        reach("save.written", step=self.state.step)

    module.CheckpointSaver.save = faulty_save  # pyright: ignore[reportAttributeAccessIssue]
    module._Writing.run = faulty_run  # pyright: ignore[reportAttributeAccessIssue]


def _patch_head(module: ModuleType) -> None:
    _before(module, "replace_head", "swap_head")


def _patch_assemble(module: ModuleType) -> None:
    _before(module.Assembler, "train", "batch")


def _before(owner: Any, name: str, point: str) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def faulty(*arguments: Any, **named: Any) -> Any:
        reach(point, step=_step)
        return function(*arguments, **named)

    setattr(owner, name, faulty)


def _after(owner: Any, name: str, point: str) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def faulty(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        reach(point, step=_step + 1)
        return result

    setattr(owner, name, faulty)
