"""One of two processes that trains tiny steps on real engines and records the bytes that are alive and sent.

Started by test_engine_memory.py as `python engine_memory_worker.py OUT RANK WORLD`; OUT/cases.json names the cases, and
rank 0 writes OUT/results.json. Buckets, and what ZeRO 3 leaves whole, are as small against this model as they are
against a real one.
"""

import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardvit.model.init import initialise
from shardvit.model.vit import build_model
from shardvit.pipeline.engine import deepspeed_engine as engine_deepspeed
from shardvit.pipeline.engine import zero_config
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.engine.saved_state.host_copy import copy_bytes
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.schema import Recipe
from tests.pipeline.budget.planning import recipe, stage_plan

BUCKET_ELEMENTS = 50_000  # a block
WHOLE_ELEMENTS = 500  # of parameters that ZeRO 3 does not shard
SIZE, IMAGES, CLASSES = 8, 2, 10
MODEL = {"width": 64, "depth": 12, "heads": 2, "patch_size": 4}
# backend, ZeRO stage, precision, accumulated micro-batches, overlap
CASES = [
    ("accelerate", 0, "bf16", 1),
    ("deepspeed", 0, "bf16", 1),
    ("deepspeed", 1, "bf16", 1),
    ("deepspeed", 2, "bf16", 1),
    ("deepspeed", 3, "bf16", 1),
    ("deepspeed", 1, "bf16", 2),
    ("deepspeed", 2, "bf16", 2),
    ("deepspeed", 1, "fp32", 1),
    ("deepspeed", 3, "fp32", 1),
    ("deepspeed", 1, "bf16", 1, "off"),
    ("deepspeed", 1, "bf16", 2, "off"),
    ("deepspeed", 1, "fp32", 1, "off"),
]


def name_of(case: tuple[Any, ...]) -> str:
    return "-".join(map(str, case))


def recipe_of(case: tuple[Any, ...]) -> Recipe:
    backend, zero_stage, precision, _, *overlap = case
    engine = {"backend": backend, "zero_stage": zero_stage, "precision": precision}
    if zero_stage:
        engine |= {"bucket_elements": BUCKET_ELEMENTS, "overlap": overlap[0] if overlap else "auto"}
    stage = {"ema": {"decay": 0.999}} if zero_stage == 2 else None
    return recipe(MODEL, image_size=SIZE, batch=64, engine=engine, stage=stage)


class Tracker(TorchDispatchMode):
    """Bytes of all tensors that operations made and that are still alive, and bytes given to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sent: dict[str, int] = {}
        self.paused = False
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [each for each in tree_iter(args) if isinstance(each, Tensor)]
            largest = max((each.numel() * each.element_size() for each in tensors), default=0)
            name = str(func).split(".")[1].strip("_")
            self.sent[name] = self.sent.get(name, 0) + largest
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor) and each.device.type == "cpu" and not self.paused:
                self._see(each.untyped_storage())
        return result

    def without_gloos_copy(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """gloo reduces and scatters a copy of the whole input, which NCCL does not make."""

        def called(*args: Any, **more: Any) -> Any:
            self.paused = True
            try:
                return collective(*args, **more)
            finally:
                self.paused = False

        return called

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += num_bytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


def measure(case: tuple[Any, ...], *, tracker: Tracker, ranks: Ranks) -> dict[str, Any]:
    made, accumulation = recipe_of(case), case[3]
    gc.collect()
    before = tracker.live
    model = build_model(made.model, image_size=SIZE, num_classes=CLASSES, head="linear")
    initialise(model, seed=0)
    number = sum(parameter.numel() for parameter in model.parameters())
    plan = stage_plan(processes=ranks.place.world_size, accumulation=accumulation, micro_batch=IMAGES)
    engine = open_engine(made, stage="pretrain", plan=plan, model=model, ranks=ranks)
    del model
    images, labels = torch.randn(IMAGES, 3, SIZE, SIZE).to(engine.input_dtype), torch.zeros(IMAGES, dtype=torch.long)

    def step() -> int:
        """The most that was alive before the optimizer stepped."""
        for _ in range(accumulation):
            engine.backward(torch.nn.functional.cross_entropy(engine.forward(images).float(), labels))
        backward_peak = tracker.peak
        engine.step(lr=0.001, flags=(False, False))
        return backward_peak

    step()  # makes the moments
    gc.collect()
    tracker.sent.clear()
    resting, tracker.peak = tracker.live - before, tracker.live
    backward_peak = step()
    found = {
        "parameters": number,
        "resting_bytes": resting,
        "backward_peak_bytes": backward_peak - before,
        "peak_bytes": tracker.peak - before,
        "sent": dict(tracker.sent),
        "copied_bytes": ranks.gather_objects(copy_bytes(engine.snapshot())),
    }
    engine.close()
    return found


def main() -> None:
    out, rank, world_size = Path(sys.argv[1]), *(int(word) for word in sys.argv[2:4])
    torch.set_num_threads(1)
    ours = zero_config.deepspeed_config

    def with_sharded_matrices(*args: Any, **more: Any) -> dict[str, Any]:
        config = ours(*args, **more)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = WHOLE_ELEMENTS
        return config

    engine_deepspeed.deepspeed_config = with_sharded_matrices
    ranks = Ranks(
        Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=out),
        timeout_seconds=120,
    )
    results: dict[str, dict[str, Any]] = {}
    with Tracker() as tracker:
        torch.distributed.reduce_scatter_tensor = tracker.without_gloos_copy(torch.distributed.reduce_scatter_tensor)
        wanted = json.loads((out / "cases.json").read_text(encoding="utf-8"))
        for case in CASES:
            if name_of(case) in wanted:
                results[name_of(case)] = measure(case, tracker=tracker, ranks=ranks)
    if rank == 0:
        (out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    ranks.leave()


if __name__ == "__main__":
    main()
