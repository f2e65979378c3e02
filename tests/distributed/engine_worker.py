"""One rank of the engines' tests: trains the same tiny model under every backend, stage and precision.

And one model of every other kind, for a few steps. Started by test_engines.py as `python engine_worker.py OUT RANK
WORLD`. Rank 0 writes OUT/results.pt: what `run_case` returns for each case, and `run_kind` for each kind of model.
"""

import contextlib
import copy
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shardvit.model import vit
from shardvit.model.init import initialise
from shardvit.pipeline.engine.late_metrics import LateMetrics
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.engine.saved_state.state_files import write_file
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.optimizer import Schedule
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import StagePlan

STEPS, DECAY = 10, 0.9
GLOBAL_BATCH, CLASSES, SIZE = 16, 5, 8
CASES = [
    *(("deepspeed", stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")),
    *(("deepspeed", 1, precision, "off") for precision in ("fp32", "bf16")),  # averaged after the backward pass
    ("accelerate", 0, "fp32"),
]
VIT = {"width": 16, "depth": 2, "heads": 2, "patch_size": 4}
KINDS = {
    "hybrid": {**VIT, "resnet_layers": [1]},
    "resnet": {"resnet_layers": [1, 1]},
    "gap": {**VIT, "pool": "gap"},
    "map": {**VIT, "pool": "map", "layer_scale": 0.5},
    "relative": {**VIT, "position": "relative"},
    "learned_2d": {**VIT, "position": "learned_2d", "position_at": "every_layer"},
    "sincos_2d": {**VIT, "position": "sincos_2d"},
    "later": {**VIT, "registers": 2, "rope": "mixed", "mlp": "swiglu_norm", "norm": "rms", "qk_norm": "per_head"},
    "dinov3": {**VIT, "pool": "gap", "class_token": "kept", "registers": 2, "rope": "dinov3", "final_norm": "pooled"},
}
KIND_STEPS = 3
KIND_CASES = [
    (kind, stage, precision) for kind in KINDS for stage, precision in ((1, "fp32"), (3, "fp32"), (3, "bf16"))
]


def recipe_for(
    backend: str, stage: int, precision: str, overlap: str = "auto", *, model: dict = VIT, ema: bool = False
) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "model": model,
            "engine": {"backend": backend, "zero_stage": stage, "precision": precision, "overlap": overlap},
            "stages": {
                "pretrain": {
                    "train": "unused",
                    "eval": "unused",
                    "image_size": SIZE,
                    "global_batch_size": GLOBAL_BATCH,
                    "duration": f"{STEPS} steps",
                    "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_grad_norm": 1.0},
                    **({"ema": {"decay": DECAY}} if ema else {}),
                }
            },
        }
    )


def plan_for(world_size: int, accumulation: int) -> StagePlan:
    return StagePlan(
        world_size=world_size,
        global_batch_images=GLOBAL_BATCH,
        micro_batch_size=GLOBAL_BATCH // world_size // accumulation,
        accumulation_steps=accumulation,
        lanes=GLOBAL_BATCH,
        total_steps=STEPS,
        schedule=Schedule(),
        log_steps=1,
        eval_steps=0,
        save_steps=0,
        samples_per_epoch=100,
    )


def placeholder(recipe: Recipe) -> torch.nn.Module:
    return vit.build_model(recipe.model, image_size=SIZE, num_classes=CLASSES, head="linear")


def build_model(recipe: Recipe) -> torch.nn.Module:
    model = placeholder(recipe)
    initialise(model, seed=3)
    generator = torch.Generator().manual_seed(5)  # a zero head would hide the trunk's gradients at first
    torch.nn.init.normal_(model.head.weight, std=2 / model.head.in_features**0.5, generator=generator)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(GLOBAL_BATCH, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(0, CLASSES, (GLOBAL_BATCH,), generator=generator)


def lr_at(step: int) -> float:
    return 0.01 * (1 - step / (2 * STEPS))


def kind_lr(step: int) -> float:
    return lr_at(step) / 10  # at more, bf16 leads a ResNet elsewhere


def run_steps(
    engine, ranks: Ranks, plan: StagePlan, steps, *, lr=lr_at, poison_rank: int | None = None, measure=False
) -> list[dict]:
    rows, late = [], LateMetrics(device=engine.device)
    for step in steps:
        images, labels = batch(step)
        first = ranks.place.rank * plan.micro_batch_size * plan.accumulation_steps
        losses = []
        for micro in range(plan.accumulation_steps):
            start = first + micro * plan.micro_batch_size
            part = slice(start, start + plan.micro_batch_size)
            inputs = images[part].to(engine.input_dtype)
            if poison_rank == ranks.place.rank:
                inputs = inputs * float("nan")
            loss = torch.nn.functional.cross_entropy(engine.forward(inputs).float(), labels[part])
            engine.backward(loss)
            losses.append(loss.detach())
        late.put(step + 1, engine.step(lr=lr(step), flags=(False, False), measure=measure))
        (outcome,) = late.drain()
        mean = float(ranks.gather(torch.stack(losses)).mean())
        rows.append({"loss": mean, "grad_norm": outcome.grad_norm, "applied": outcome.applied})
    return rows


def write_state(engine, folder: Path, *, ranks: Ranks) -> None:
    for file in engine.snapshot():
        write_file(folder, file)
    ranks.barrier()


class Canary:
    """Makes a file when a pickle of it is executed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


class Interrupted(Exception):
    """Raised within an evaluation."""


def evaluate(engine) -> torch.Tensor:
    engine.module.eval()
    predicted = engine.predict(batch(0)[0].to(engine.input_dtype)).float()
    engine.module.train()
    return predicted


def averaged(engine) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with engine.averaged():
        return evaluate(engine), copy.deepcopy(engine.weights())


def computing(engine, *, stage: int) -> dict[str, torch.Tensor]:
    """The weights that the forward pass uses in an evaluation of the average, whole."""
    parameters = dict(engine.module.named_parameters())
    gathered = contextlib.nullcontext()
    if stage == 3:
        import deepspeed  # the engine has: imported before, it would import mlflow

        gathered = deepspeed.zero.GatheredParameters([*parameters.values()])
    with engine.averaged():
        evaluate(engine)
        with gathered:
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def run_case(case: tuple, ranks: Ranks, folder: Path) -> dict:
    """Train with a moving average and evaluations of it; resume from the middle without either."""
    plan, last = plan_for(ranks.place.world_size, accumulation=2), ranks.place.world_size - 1

    def fresh(*, ema: bool):
        recipe = recipe_for(*case, ema=ema)
        return open_engine(recipe, stage="pretrain", plan=plan, model=build_model(recipe), ranks=ranks)

    engine, rows, saved, saved_average = fresh(ema=True), [], {}, {}
    at_start = copy.deepcopy(engine.weights())
    plain, update = {name: tensor.clone() for name, tensor in at_start.items()}, get_ema_multi_avg_fn(DECAY)
    for step in range(STEPS):
        rows += run_steps(engine, ranks, plan, [step])
        weights = copy.deepcopy(engine.weights())
        update(list(plain.values()), [weights[name] for name in plain], None)
        if step % 3 == 0:  # at evaluations, one of which fails
            with contextlib.suppress(Interrupted), engine.averaged():
                evaluate(engine)
                if step == 3:
                    raise Interrupted
            after = engine.weights()
            assert all(torch.equal(after[name], weights[name]) for name in weights)
        if step + 1 == STEPS // 2:
            write_state(engine, folder, ranks=ranks)
            saved, saved_average = weights, averaged(engine)[1]
    weights, predicted, average = copy.deepcopy(engine.weights()), evaluate(engine), averaged(engine)
    computed = computing(engine, stage=case[1])
    run_steps(engine, ranks, plan, [STEPS], poison_rank=last)
    average_after_poison = averaged(engine)[1]

    resumed = fresh(ema=False)
    resumed.load(folder, written={"zero_stage": case[1], "processes": ranks.place.world_size})
    restored = resumed.weights()
    resumed_rows = run_steps(resumed, ranks, plan, range(STEPS // 2, STEPS))
    resumed_weights = copy.deepcopy(resumed.weights())
    decays = weight_decays(resumed)
    held = {
        "step": what_was_held(resumed, lambda: run_steps(resumed, ranks, plan, [STEPS + 2])),
        "load": what_was_held(
            resumed, lambda: resumed.load(folder, written={"zero_stage": case[1], "processes": ranks.place.world_size})
        ),
    }
    return {
        "at_start": at_start,
        "rows": rows,
        "saved": saved,
        "plain average": plain,
        "average": average,
        "computing": computed,
        "saved average": saved_average,
        "average after poison": average_after_poison,
        "restored": restored,
        "weights": weights,
        "predicted": predicted,
        "resumed_rows": resumed_rows,
        "resumed_weights": resumed_weights,
        "decays": decays,
        "held": held,
        "measured": measured_steps(resumed, ranks, plan),
    }


def measured_steps(engine, ranks: Ranks, plan: StagePlan) -> list[tuple[dict, dict]]:
    """What the engine measures of a step that is skipped, of one that is not, and of one that is not measured; each
    with the same from the weights before and after."""
    found = []
    for poison_rank, measure in ((0, True), (None, True), (None, False)):
        before = copy.deepcopy(engine.weights())
        run_steps(engine, ranks, plan, [STEPS + 3], poison_rank=poison_rank, measure=measure)
        after = engine.weights()
        flat = torch.cat([tensor.double().flatten() for tensor in after.values()])
        change = flat - torch.cat([tensor.double().flatten() for tensor in before.values()])
        expected = {"opt/parameter_norm": float(flat.norm()), "opt/update_ratio": float(change.norm() / flat.norm())}
        found.append((engine.measured(), expected))
    assert all(each == found for each in ranks.gather_objects(found))
    return found


def what_was_held(engine, change) -> dict[str, bool]:
    """Whether `change` waits for a snapshot once, and before anything of what that shares has changed."""
    shared = [tensor for file in engine.snapshot() for tensor in file.tensors or ()]
    before = [tensor.clone() for tensor in shared]
    seen: list[bool] = []
    engine.hold.set(lambda: seen.append(all(map(torch.equal, shared, before))))
    change()
    return {"whole when waited for": seen == [True], "changed after": not all(map(torch.equal, shared, before))}


def run_flags(case: tuple, ranks: Ranks) -> list[tuple[tuple[bool, ...], tuple[bool, ...]]]:
    """Reduced and raised flags: one rank raises one at a time; also in skipped steps."""
    recipe, plan = recipe_for(*case), plan_for(ranks.place.world_size, accumulation=1)
    engine = open_engine(recipe, stage="pretrain", plan=plan, model=build_model(recipe), ranks=ranks)
    late, heard = LateMetrics(device=engine.device), []
    for step, wanted in enumerate(((False, False), (True, False), (False, True))):
        mine = wanted if ranks.place.rank == step % ranks.place.world_size else (False, False)
        images, labels = batch(step)
        engine.backward(
            torch.nn.functional.cross_entropy(engine.forward(images[:8].to(engine.input_dtype)), labels[:8])
        )
        late.put(2 * step, engine.step(lr=0.01, flags=mine))
        late.put(2 * step + 1, engine.pass_over(flags=mine))
        heard += [(outcome.flags, wanted) for outcome in late.drain()]
    return heard


def run_kind(case: tuple[str, int, str], ranks: Ranks, folder: Path) -> dict:
    kind, stage, precision = case
    recipe = recipe_for("deepspeed", stage, precision, model=KINDS[kind])
    plan = plan_for(ranks.place.world_size, accumulation=1)
    engine = open_engine(recipe, stage="pretrain", plan=plan, model=build_model(recipe), ranks=ranks)
    rows = run_steps(engine, ranks, plan, range(KIND_STEPS), lr=kind_lr)
    write_state(engine, folder, ranks=ranks)
    weights = copy.deepcopy(engine.weights())
    engine.module.eval()
    predicted = engine.predict(batch(0)[0].to(engine.input_dtype)).float()
    return {"rows": rows, "weights": weights, "predicted": predicted}


def weight_decays(engine) -> list[float]:
    optimizer = engine.optimizer
    rules = getattr(getattr(optimizer, "optimizer", None), "_rules", None)
    if rules is None:
        return [group["weight_decay"] for group in optimizer.param_groups]
    return list(dict.fromkeys(rule.weight_decay for rule in rules.values()))  # of the flat optimizers


def joined() -> tuple[Path, Ranks]:
    """The folder and the process group of a worker's command line."""
    out, rank, world_size = Path(sys.argv[1]), *(int(word) for word in sys.argv[2:4])
    torch.set_num_threads(1)
    ranks = Ranks(
        Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=out),
        timeout_seconds=400,
    )
    return out, ranks


def main() -> None:
    out, ranks = joined()
    results = {}
    for case in (*CASES, *KIND_CASES):
        folder = out / "-".join(map(str, case))
        folder.mkdir(exist_ok=True)
        ranks.barrier()
        results[case] = (run_case if case in CASES else run_kind)(case, ranks, folder)
    results["heard"] = {case: run_flags(case, ranks) for case in CASES}
    everyone = ranks.gather_objects(results["heard"])
    assert all(heard == results["heard"] for heard in everyone)
    assert "deepspeed" in sys.modules and "mlflow" not in sys.modules  # it costs every rank 1.9 CPU seconds
    if ranks.place.is_main:
        with tempfile.NamedTemporaryFile(dir=out, delete=False) as file:
            torch.save(results, file)
        Path(file.name).rename(out / "results.pt")
    ranks.leave()


if __name__ == "__main__":
    main()
