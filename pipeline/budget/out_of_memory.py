"""Advise after running out of memory, with the plan's numbers. No torch.

Memory may run out below the plan's estimate, which ignores allocators' rounding and fragmentation: the sentence gives
both numbers. If the state alone is too large, it does not advise a smaller micro-batch.
"""

from typing import Literal

from shardvit.data_shards.text import show_bytes
from shardvit.pipeline.budget.forecast import GivenSpeed, Hardware, Shards, forecast_stage
from shardvit.pipeline.budget.length import stage_length
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import StageName

_CLASSES = 1000  # assumed: the head is small


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
    """Advise in one sentence; `sharing`: processes that share the memory."""

    def need(**changes: object) -> tuple[int, int]:
        return _need(recipe, changes, stage=stage, processes=processes)

    engine, (micro_batch, now) = recipe.engine, need()
    ways: list[str] = []
    fewer = micro_batch
    while fewer > 1:
        fewer //= 2
        taken, num_bytes = need(max_micro_batch_size=fewer)
        if num_bytes * sharing < 0.8 * memory_bytes and num_bytes < 0.8 * now:
            ways.append(f"engine.max_micro_batch_size to {taken} ({show_bytes(num_bytes)})")
            break
    others: dict[str, object] = {}
    if engine.checkpointed_every != 1:
        others["activation_checkpointing"] = True
    if engine.backend == "deepspeed" and engine.zero_stage < 3 and processes > 1:
        others["zero_stage"] = 3
    for key, value in others.items():
        _, num_bytes = need(**{key: value})
        if num_bytes < 0.9 * now:
            ways.append(f"engine.{key} to {str(value).lower()} ({show_bytes(num_bytes)})")
    per = f" for each of {sharing} processes" if sharing > 1 else ""
    advice = "set " + ", or ".join(ways) if ways else "take a smaller model, or more memory"
    return (
        f"{stage}: out of memory: a micro-batch of {micro_batch} needs about {show_bytes(now)} (the plan's "
        f"estimate{per}) of this {of}'s {show_bytes(memory_bytes)}; {advice}; checkpoints are kept, and the same "
        "command resumes"
    )


def _need(recipe: Recipe, changes: dict[str, object], *, stage: StageName, processes: int) -> tuple[int, int]:
    """Get micro-batch and peak bytes of a process with `changes` to the engine."""
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes)})
    found = forecast_stage(
        recipe,
        stage=stage,
        length=stage_length(recipe, stage=stage, num_images=None, processes=processes),
        shards=Shards(None, _CLASSES),
        machine=Hardware(processes, None, None),
        given=GivenSpeed(),
    )
    return found.plan.micro_batch_size, found.own.peak_bytes[found.activations]
