"""Say what to change after running out of memory, with the plan's numbers. No torch.

The plan leaves out what allocators round up and cut up, so memory may end at an estimate that is below it: the sentence
says both, and what would take less. Where the state alone is too large, a smaller micro-batch is no advice.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from data_shards.text import show_bytes
from pipeline.budget.cost import stage_cost
from pipeline.budget.length import stage_length
from pipeline.budget.memory import ZeroStage, state_of
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import StageName

_CLASSES = 1000  # assumed: the head weighs little beside the rest


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise out-of-memory errors of torch (GPU or CPU) and Python."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text and "allocate memory" in text)
    )


def what_to_change(
    recipe: Recipe, *, stage: StageName, processes: int, memory_bytes: int, of: Literal["GPU", "machine"], sharing: int
) -> str:
    """A sentence; `sharing`: how many processes there have that memory."""
    need = partial(_need, recipe, stage=stage, processes=processes)
    micro_batch, now = need({})
    per = f" for each of {sharing} processes" if sharing > 1 else ""
    ways: list[str] = []
    fewer = micro_batch
    while fewer > 1:
        fewer //= 2
        taken, num_bytes = need({"max_micro_batch_size": fewer})
        if num_bytes * sharing < 0.8 * memory_bytes and num_bytes < 0.8 * now:
            ways.append(f"engine.max_micro_batch_size to {taken} ({show_bytes(num_bytes)})")
            break
    engine, others = recipe.engine, dict[str, object]()
    if engine.checkpointed_every != 1:
        others["activation_checkpointing"] = True
    if engine.backend == "deepspeed" and engine.zero_stage < 3 and processes > 1:
        others["zero_stage"] = 3
    for key, value in others.items():
        _, num_bytes = need({key: value})
        if num_bytes < 0.9 * now:
            ways.append(f"engine.{key} to {str(value).lower()} ({show_bytes(num_bytes)})")
    advice = "set " + ", or ".join(ways) if ways else "take a smaller model, or more memory"
    return (
        f"{stage}: out of memory: a micro-batch of {micro_batch} needs about {show_bytes(now)} (the plan's "
        f"estimate{per}) of this {of}'s {show_bytes(memory_bytes)}; {advice}; checkpoints are kept, and the same "
        "command goes on"
    )


def _need(recipe: Recipe, changes: dict[str, object], *, stage: StageName, processes: int) -> tuple[int, int]:
    """Micro-batch and peak bytes of a process with `changes` to the engine's keys."""
    engine = recipe.engine.model_copy(update=changes)
    recipe = recipe.model_copy(update={"engine": engine})
    config = recipe.train_stage(stage)
    plan = stage_length(recipe, stage=stage, num_images=None, processes=processes).plan
    cost = stage_cost(recipe.model, stage=config, engine=engine, num_classes=_CLASSES)
    zero_stage: ZeroStage = engine.zero_stage if engine.backend == "deepspeed" else 0
    held = state_of(
        cost.parameters, engine=engine, optimizer=config.optimizer, plan=plan, zero_stage=zero_stage, ema=config.ema
    )
    kind = "checkpointed" if engine.checkpointed_every else "all"
    return plan.micro_batch_size, held.peak_bytes(plan.micro_batch_size * cost.image_bytes(kind))
