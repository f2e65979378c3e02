"""One of n ranks that train with LAMB and Muon, whose laws need whole tensors, under ZeRO 1 and 2.

Started by test_whole_tensors.py as `python whole_tensors_worker.py OUT RANK WORLD`. Rank 0 writes OUT/results.pt: what
`run_law` returns for each optimizer, and `run_case` for each case.
"""

import copy
import importlib.util
import math
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.optimizers.flat import FlatOptimizer, FlatPiece, GradientVerdict
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.optimizer import OptimizerConfig
from shardvit.pipeline.recipe.schema import Recipe

_spec = importlib.util.spec_from_file_location("engine_worker", Path(__file__).with_name("engine_worker.py"))
common = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(common)

STEPS, POISONED, SAVED = 8, 3, 5
MODEL = {"width": 16, "depth": 2, "heads": 2, "patch_size": 4}
SMALL_BUCKET = 1024  # elements, of 7,000 parameters
CLIP, LR, DECAY = 1.0, 0.005, 0.1
EVERYTHING = {"layer_decay": 0.8, "head_lr_factor": 2.0, "head_weight_decay": 0.3}


def lr_at(step: int) -> float:
    return LR * (1 - step / (2 * STEPS))


@dataclass(frozen=True)
class Case:
    """How the model is trained."""

    name: str
    zero_stage: int
    precision: str = "fp32"
    accumulation: int = 1
    overlap: str = "auto"
    more: dict[str, Any] = field(default_factory=dict)  # of the optimizer's keys

    def __str__(self) -> str:
        values = (*(value for key, value in asdict(self).items() if key != "more"), "everything" if self.more else "")
        return "-".join(map(str, filter(None, values)))


CASES = [
    *(Case(name, stage) for name in ("lamb", "muon") for stage in (0, 1)),
    *(Case(name, 1, "bf16") for name in ("lamb", "muon")),
    *(Case(name, 2, "fp32", accumulation=2, overlap="off") for name in ("lamb", "muon")),
    *(Case(name, 1, more={**EVERYTHING, "frozen": ("positions", "blocks.0.mlp.*")}) for name in ("lamb", "muon")),
]


def config_of(name: str, more: dict[str, Any]) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=LR, weight_decay=DECAY, clip_grad_norm=CLIP, **more)  # pyright: ignore[reportArgumentType]


def recipe_for(case: Case) -> Recipe:
    recipe = common.recipe_for("deepspeed", case.zero_stage, case.precision, case.overlap, model=MODEL, ema=True)
    recipe = recipe.model_dump(exclude_unset=True)
    if case.zero_stage:
        recipe["engine"]["bucket_elements"] = SMALL_BUCKET
    recipe["stages"]["pretrain"]["optimizer"] = config_of(case.name, case.more).model_dump(exclude_unset=True)
    return Recipe.model_validate(recipe)


def run_case(case: Case, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Some steps, of which one has a NaN on one rank; the last of them again from a checkpoint."""
    recipe, plan = recipe_for(case), common.plan_for(ranks.place.world_size, accumulation=case.accumulation)

    def fresh():
        return open_engine(recipe, stage="pretrain", plan=plan, model=common.build_model(recipe), ranks=ranks)

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
    resumed = fresh()
    resumed.load(folder, written={"zero_stage": case.zero_stage, "processes": ranks.place.world_size})
    again = run(resumed, range(SAVED, STEPS))
    found = {
        "rows": rows,
        "resumed_rows": again,
        "weights": copy.deepcopy(engine.weights()),
        "resumed_weights": copy.deepcopy(resumed.weights()),
        "moved_by_nan": [name for name in before if not torch.equal(before[name], after[name])],
        "state_bytes": ranks.gather_objects(state_bytes(engine)),
    }
    engine.close()
    resumed.close()
    return found


def state_bytes(engine) -> int:
    """Of this rank's masters and moments."""
    inner = engine._inner_optimizer()
    tensors = [*engine._masters.values(), *(each for state in inner.state.values() for each in state.values())]
    return sum(each.numel() * each.element_size() for each in tensors)


class Net(nn.Module):
    """With matrices of several shapes, one of which is larger than a process's piece, and a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.patch_embed = nn.Linear(5, 6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(6, 18), "proj": nn.Linear(6, 6)})
        self.attn.num_heads = 2
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(6, 24), "fc2": nn.Linear(24, 6)})
        self.conv = nn.Conv2d(6, 4, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)


def made_gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = 3.0 if step % 2 else 0.01  # some are clipped
    made = {name: scale * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    if step == POISONED:
        made["norm.bias"][2] = math.nan
    return made


def verdict_of(made: dict[str, Tensor]) -> GradientVerdict:
    norm = torch.cat([each.flatten() for each in made.values()]).double().norm().float()
    return GradientVerdict(skip=(~norm.isfinite()).float(), divisor=((norm + 1e-6) / CLIP).clamp(min=1.0))


def run_law(name: str, ranks: Ranks) -> dict[str, Tensor]:
    """The law alone: whole gradients, given to all ranks, step the pieces of two buckets."""
    model, config, n, rank = Net(), config_of(name, {}), ranks.place.world_size, ranks.place.rank
    groups = parameter_groups(model, config)
    buckets = [
        [(name, each) for group in groups if bool(group.get("orthogonal")) is kind for name, each in group["params"]]
        for kind in (False, True)
    ]
    buckets = [bucket for bucket in buckets if bucket]
    verdicts: list[GradientVerdict] = []
    optimizer = FlatOptimizer(groups, config, buckets=buckets, judge=lambda _: verdicts.pop())
    places, masters = {}, []
    for number, (group, bucket) in enumerate(zip(optimizer.param_groups, buckets, strict=True)):
        flat = torch.cat([each.detach().flatten() for _, each in bucket])
        size = -(-flat.numel() // n)
        flat = torch.cat([flat, torch.zeros(size * n - flat.numel())])
        masters.append(flat[rank * size : (rank + 1) * size].clone().requires_grad_())
        group["params"] = [masters[-1]]
        ends = [0, *accumulate(each.numel() for _, each in bucket)]
        for (one, each), begin in zip(bucket, ends, strict=False):
            first, stop = max(begin, rank * size), min(begin + each.numel(), (rank + 1) * size)
            if first < stop:
                places[one] = FlatPiece(number, first - rank * size, stop - first, first - begin)
    optimizer.place(places)
    for step in range(STEPS):
        made = made_gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        pieces = []
        for bucket, master in zip(buckets, masters, strict=True):
            flat = torch.cat([made[one].flatten() for one, _ in bucket])
            flat = torch.cat([flat, torch.zeros(master.numel() * n - flat.numel())])
            pieces.append(flat[rank * master.numel() : (rank + 1) * master.numel()])
        verdicts.append(verdict_of(made))
        optimizer.step_by(torch.cat(pieces))
    found = {}
    for bucket, master in zip(buckets, masters, strict=True):
        whole = [torch.empty_like(master.detach()) for _ in range(n)]
        distributed.all_gather(whole, master.detach().clone())
        flat = torch.cat(whole)[: sum(each.numel() for _, each in bucket)]
        found |= {
            one: piece for (one, _), piece in zip(bucket, flat.split([p.numel() for _, p in bucket]), strict=True)
        }
    return found


def main() -> None:
    out, ranks = common.joined()
    results: dict[str, Any] = {name: run_law(name, ranks) for name in ("lamb", "muon")}
    for case in CASES:
        folder = out / str(case)
        folder.mkdir(exist_ok=True)
        ranks.barrier()
        results[str(case)] = run_case(case, ranks, folder)
    if ranks.place.is_main:
        torch.save(results, out / "results.pt")
    ranks.leave()


if __name__ == "__main__":
    main()
