"""One of two ranks that trains one tiny model for 20 steps in every way that must come to the same.

Started by test_equality.py as `python equality_worker.py OUT RANK WORLD`; OUT/which says which of `CASES`. Rank 0
writes OUT/results.pt: what `run_case` returns for each case.
"""

import copy
import importlib.util
import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from shardvit.model.vit import checkpoint_blocks
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.kernels.compiled_blocks import compile_blocks
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.schema import Recipe

_spec = importlib.util.spec_from_file_location("engine_worker", Path(__file__).with_name("engine_worker.py"))
common = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(common)

STEPS, POISONED, SAVED = 20, 6, 10
MODEL = {"width": 16, "depth": 2, "heads": 2, "patch_size": 4}
SMALL_BUCKET = 1024  # elements, of 7,000 parameters


def lr_at(step: int) -> float:
    return 0.001 * (1 - step / (2 * STEPS))


@dataclass(frozen=True)
class Case:
    """How the model is trained; what is left out is the recipe's default."""

    zero_stage: int
    precision: str = "fp32"
    accumulation: int = 1
    overlap: Literal["auto", "off"] = "auto"  # auto is on, of two ranks
    bucket_elements: int = 25_000_000
    activation_checkpointing: int = 0
    offload: str = "none"
    compile: str = "off"
    backend: str = "deepspeed"

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in asdict(self).items() if value != DEFAULTS[key])


DEFAULTS = asdict(Case(zero_stage=-1))


def _offloads(zero_stage: int) -> tuple[str, ...]:
    return ("none", "optimizer", "optimizer_and_parameters")[: (1, 2, 2, 3)[zero_stage]]


# Each way under each stage at least once, in float32 and, less often, in bf16.
SOME = [
    Case(0),
    Case(0, accumulation=2, backend="accelerate"),
    Case(0, accumulation=2, bucket_elements=SMALL_BUCKET, activation_checkpointing=1),
    Case(1, bucket_elements=SMALL_BUCKET, activation_checkpointing=2),
    Case(1, accumulation=2, overlap="off"),
    Case(1, accumulation=2, offload="optimizer", activation_checkpointing=1),
    Case(2, overlap="off", activation_checkpointing=1),
    Case(2, accumulation=2, bucket_elements=SMALL_BUCKET),
    Case(2, offload="optimizer"),
    Case(3, bucket_elements=SMALL_BUCKET),
    Case(3, accumulation=2, overlap="off", activation_checkpointing=1, offload="optimizer_and_parameters"),
    Case(0, "bf16", accumulation=2),
    Case(1, "bf16", overlap="off", activation_checkpointing=1),
    Case(1, "bf16", accumulation=2, bucket_elements=SMALL_BUCKET),
    Case(2, "bf16", accumulation=2, offload="optimizer"),
    Case(3, "bf16", activation_checkpointing=1, offload="optimizer"),
]
EVERY = [
    Case(stage, precision, accumulation, overlap, bucket, every, offload)  # pyright: ignore[reportArgumentType]
    for stage, precision, accumulation, overlap, bucket, every in itertools.product(
        (0, 1, 2, 3), ("fp32", "bf16"), (1, 2), ("auto", "off"), (25_000_000, SMALL_BUCKET), (0, 1)
    )
    for offload in _offloads(stage)
    if stage or overlap == "auto"  # ZeRO 0 leaves it to DDP
]
COMPILED = [
    Case(stage, precision, 2, activation_checkpointing=every, compile="blocks")
    for stage, precision, every in itertools.product((0, 1, 2), ("fp32", "bf16"), (0, 1))
]
CASES = {
    "some": SOME,
    # A start of the ranks for so many at the most: ZeRO 3 takes several seconds a case.
    **{f"every-{first}": EVERY[first : first + 30] for first in range(0, len(EVERY), 30)},
    "compiled": COMPILED,
}


def recipe_for(case: Case) -> Recipe:
    engine = {key: value for key, value in asdict(case).items() if key != "accumulation" and value != DEFAULTS[key]}
    if case.activation_checkpointing == 1:
        engine["activation_checkpointing"] = True
    recipe = common.recipe_for("deepspeed", case.zero_stage, case.precision, model=MODEL).model_dump(exclude_unset=True)
    recipe["engine"] |= engine
    recipe["stages"]["pretrain"]["optimizer"]["lr"] = lr_at(0)
    return Recipe.model_validate(recipe)


def run_case(case: Case, ranks: Ranks, folder: Path) -> dict:
    """20 steps, of which one has a NaN on one rank, and the last 10 of them once more from a checkpoint."""
    recipe = recipe_for(case)
    plan = common.plan_for(ranks.place.world_size, accumulation=case.accumulation)

    def fresh():
        model = common.build_model(recipe)
        if recipe.engine.checkpointed_every:
            checkpoint_blocks(model, every=recipe.engine.checkpointed_every)
        if case.compile == "blocks":
            compile_blocks(model, device=torch.device("cpu"))
        return open_engine(recipe, stage="pretrain", plan=plan, model=model, ranks=ranks)

    def run(engine, steps, *, poison: bool = False) -> list[dict]:
        poison_rank = ranks.place.world_size - 1 if poison else None
        return common.run_steps(engine, ranks, plan, steps, lr=lr_at, poison_rank=poison_rank)

    engine = fresh()
    rows = run(engine, range(POISONED))
    before = copy.deepcopy(engine.weights())
    rows += run(engine, [POISONED], poison=True)
    after = copy.deepcopy(engine.weights())
    rows += run(engine, range(POISONED + 1, SAVED))
    common.write_state(engine, folder, ranks=ranks)
    rows += run(engine, range(SAVED, STEPS))
    weights = copy.deepcopy(engine.weights())

    resumed = fresh()
    resumed.load(folder, written={"zero_stage": case.zero_stage, "processes": ranks.place.world_size})
    return {
        "rows": rows,
        "weights": weights,
        "moved_by_nan": [name for name in before if not torch.equal(before[name], after[name])],
        "resumed_rows": run(resumed, range(SAVED, STEPS)),
        "resumed_weights": copy.deepcopy(resumed.weights()),
    }


def main() -> None:
    out, ranks = common.joined()
    results = {}
    for number, case in enumerate(CASES[(out / "which").read_text(encoding="utf-8")]):
        folder = out / str(number)
        folder.mkdir(exist_ok=True)
        ranks.barrier()
        results[str(case)] = run_case(case, ranks, folder)
    if ranks.place.is_main:
        torch.save(results, out / "results.pt")
    ranks.leave()


if __name__ == "__main__":
    main()
