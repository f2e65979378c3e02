"""One rank of the moving average's tests: under every backend, stage and precision, what `run_case` returns.

Started by test_average.py as `python average_worker.py OUT RANK WORLD`; rank 0 writes OUT/results.pt.
"""

import contextlib
import copy
import importlib.util
import sys
from pathlib import Path

import deepspeed
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipeline.engine.open import open_engine
from pipeline.ranks.group import Ranks
from pipeline.ranks.place import Place
from pipeline.recipe.schema import Recipe

_spec = importlib.util.spec_from_file_location("engine_worker", Path(__file__).with_name("engine_worker.py"))
common = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(common)

STEPS, SKIPPED, SAVED = 50, 20, 30  # the step that is skipped, and the one after which all is saved
DECAY = 0.9
CASES = common.CASES


class Interrupted(Exception):
    """Raised within an evaluation."""


def fresh(case: tuple[str, int, str], ranks: Ranks, *, ema: bool = True):
    tree = common.recipe_for(*case).model_dump(exclude_unset=True)
    if ema:
        tree["stages"]["pretrain"]["ema"] = {"decay": DECAY}
    recipe = Recipe.model_validate(tree)
    plan = common.plan_for(ranks.place.world_size, accumulation=1)
    return open_engine(recipe, stage="pretrain", plan=plan, model=common.build_model(recipe), ranks=ranks), plan


def evaluate(engine) -> torch.Tensor:
    engine.module.eval()
    predicted = engine.predict(common.batch(0)[0].to(engine.input_dtype)).float()
    engine.module.train()
    return predicted


def averaged(engine) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with engine.averaged():
        return evaluate(engine), copy.deepcopy(engine.weights())


def computing(engine, *, stage: int) -> dict[str, torch.Tensor]:
    """The weights that the forward pass uses in an evaluation of the average, whole."""
    parameters = dict(engine.module.named_parameters())
    with engine.averaged():
        evaluate(engine)
        gathered = deepspeed.zero.GatheredParameters([*parameters.values()]) if stage == 3 else contextlib.nullcontext()
        with gathered:
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def step_lr(step: int) -> float:
    return 0.002 / (1 + step)


def run_case(case: tuple[str, int, str], ranks: Ranks, folder: Path) -> dict:
    poison = ranks.place.world_size - 1

    def step(engine, plan, number: int) -> dict:
        rank = poison if number == SKIPPED else None
        return common.run_steps(engine, ranks, plan, [number], lr=step_lr, poison_rank=rank)[0]

    engine, plan = fresh(case, ranks)
    plain = {name: tensor.clone() for name, tensor in engine.weights().items()}
    update, rows, saved = get_ema_multi_avg_fn(DECAY), [], {}
    for number in range(STEPS):
        rows.append(step(engine, plan, number))
        weights = engine.weights()
        if rows[-1]["applied"]:
            update(list(plain.values()), [weights[name] for name in plain], None)
        if number % 10 == 0:  # at evaluations, one of which fails
            with contextlib.suppress(Interrupted), engine.averaged():
                evaluate(engine)
                if number == 10:
                    raise Interrupted
            after = engine.weights()
            assert all(torch.equal(after[name], weights[name]) for name in weights)
        if number + 1 == SAVED:
            common.write_state(engine, folder, ranks=ranks)
            saved = averaged(engine)[1]

    quiet, plan = fresh(case, ranks, ema=False)
    quiet_rows = [step(quiet, plan, number) for number in range(STEPS)]
    resumed, plan = fresh(case, ranks)
    resumed.load(folder, written={"zero_stage": case[1], "processes": ranks.place.world_size})
    restored = averaged(resumed)[1]
    resumed_rows = [step(resumed, plan, number) for number in range(SAVED, STEPS)]
    return {
        "rows": rows,
        "plain": plain,
        "average": averaged(engine),
        "computing": computing(engine, stage=case[1]),
        "weights": copy.deepcopy(engine.weights()),
        "saved": saved,
        "quiet_rows": quiet_rows,
        "quiet_weights": copy.deepcopy(quiet.weights()),
        "restored": restored,
        "resumed_rows": resumed_rows,
        "resumed_average": averaged(resumed),
        "resumed_weights": copy.deepcopy(resumed.weights()),
    }


def main() -> None:
    out, rank, world_size = Path(sys.argv[1]), *(int(word) for word in sys.argv[2:4])
    torch.set_num_threads(1)
    ranks = Ranks(
        Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=out),
        timeout_seconds=400,
    )
    results = {}
    for case in CASES:
        folder = out / "-".join(map(str, case))
        folder.mkdir(exist_ok=True)
        ranks.barrier()
        results[case] = run_case(case, ranks, folder)
    if rank == 0:
        torch.save(results, out / "results.pt")
    ranks.leave()


if __name__ == "__main__":
    main()
