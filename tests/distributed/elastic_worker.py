"""All ranks of the elastic tests: groups of one, two and three processes that write states and read one another's.

Started by test_elastic.py as `python elastic_worker.py OUT`; the libraries are imported once, and the
six ranks are forked. Rank 0 of each group writes OUT/world-N.pt: what `write_case` and `read_case` return.
"""

import contextlib
import importlib.util
import multiprocessing
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.engine.open import open_engine
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe import vocabulary
from shardvit.pipeline.recipe.schema import Recipe

_spec = importlib.util.spec_from_file_location("engine_worker", Path(__file__).with_name("engine_worker.py"))
common = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(common)
common.GLOBAL_BATCH = 12  # one, two and three processes divide it
common.CLASSES = 2  # so that of three processes one has nothing of the head's bias

STEPS_BEFORE, STEPS_AFTER = 4, 5  # between them one that is skipped
MODEL = {"width": 16, "depth": 1, "heads": 2, "patch_size": 4}
WAIT_SECONDS = 400
OPTIMIZERS = {
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_grad_norm": 1.0},
    "sgd": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "clip_grad_norm": 1.0},
    "lamb": {"name": "lamb", "lr": 0.01, "weight_decay": 0.1},
    "muon": {"name": "muon", "lr": 0.01, "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 0.01, "weight_decay": 0.1},
}
FROZEN = ("positions", "blocks.0.mlp.*")
OPTIMIZERS["adamw frozen"] = {**OPTIMIZERS["adamw"], "frozen": FROZEN, "layer_decay": 0.9, "head_lr_factor": 2}
OPTIMIZERS |= {f"{name} bf16": {**OPTIMIZERS[name], "first_moment": "bf16"} for name in ("adamw", "sgd")}


def moments_of(optimizer: str) -> tuple[str, ...] | None:
    """The moments of every parameter; None: each has its own, and ZeRO 0 keeps them whole."""
    facts = vocabulary.OPTIMIZERS[optimizer.split()[0]]
    return facts.moments if facts.takes == "pieces" or optimizer == "lamb" else None


@dataclass(frozen=True)
class Written:
    """What a state was written with."""

    world: int
    stage: int
    precision: str = "fp32"
    optimizer: str = "adamw"
    backend: str = "deepspeed"


@dataclass(frozen=True)
class Read:
    """And by what it is read."""

    written: Written
    world: int
    stage: int


def _written(world: int, stages: str, *others: str) -> list[Written]:
    return [Written(world, int(stage), *others) for stage in stages]


WHOLE = ("lamb", "muon", "adafactor")
WRITTEN = [
    *_written(2, "0123"),
    *_written(2, "0123", "bf16"),
    *_written(2, "03", "fp32", "sgd"),
    *_written(1, "013"),
    *_written(1, "2", "bf16"),
    *_written(1, "1", "bf16", "sgd"),
    *_written(3, "01"),
    *_written(3, "0", "bf16"),
    Written(2, 0, backend="accelerate"),
    Written(2, 0, "fp32", "lamb", "accelerate"),
    Written(2, 0, "fp32", "adafactor"),
    *(Written(2, 0, "bf16", name) for name in WHOLE),
    *_written(2, "13", "bf16", "adamw bf16"),
    *_written(1, "0", "fp32", "sgd bf16"),
    *_written(2, "13", "fp32", "adamw frozen"),
    *_written(2, "02", "bf16", "adamw frozen"),
    Written(2, 0, "fp32", "adamw frozen", "accelerate"),
    *(Written(2, 1, *how) for how in (("fp32", "lamb"), ("bf16", "muon"))),
]


def _read(writer: int, reader: int, stages: str, *others: str) -> list[Read]:
    """`stages`: pairs such as "01 23", from stage 0 to stage 1 and from 2 to 3."""
    return [Read(Written(writer, int(old), *others), reader, int(new)) for old, new in stages.split()]


READ = [
    *_read(2, 2, "00 11 22 33"),  # as it was: also by the engine's own way
    *_read(2, 2, "00 11 22 33", "bf16"),
    *_read(2, 2, "00 33", "fp32", "sgd"),
    *_read(3, 3, "00 11"),  # of three ranks the order of adding up shows in the last bits
    *_read(3, 3, "00", "bf16"),
    *_read(2, 2, "01 12 23 32 30 13"),
    *_read(2, 2, "02 10 20 21 31", "bf16"),
    *_read(2, 1, "01 12 23 32 30 11"),
    *_read(2, 1, "01 13 33", "bf16"),
    *_read(2, 1, "03", "fp32", "sgd"),
    *_read(1, 2, "01 13 30 11"),
    *_read(1, 2, "23", "bf16"),
    *_read(1, 2, "13", "bf16", "sgd"),
    *_read(2, 3, "01 12 23 32 30 13"),
    *_read(2, 3, "03 32", "bf16"),
    *_read(2, 3, "31", "fp32", "sgd"),
    *(Read(Written(2, 0, backend="accelerate"), world, 0) for world in (1, 3)),
    Read(Written(2, 0, "fp32", "lamb", "accelerate"), 2, 0),
    *_read(2, 3, "00", "fp32", "adafactor"),
    *(case for name in WHOLE for case in _read(2, 2, "00", "bf16", name)),
    *_read(2, 1, "00", "bf16", "muon"),
    *_read(2, 2, "11 33", "bf16", "adamw bf16"),
    *_read(2, 3, "12 30", "bf16", "adamw bf16"),
    *_read(1, 2, "03", "fp32", "sgd bf16"),
    *_read(2, 2, "33 30", "fp32", "adamw frozen"),
    *_read(2, 3, "13", "fp32", "adamw frozen"),
    *_read(2, 2, "03 22", "bf16", "adamw frozen"),
    Read(Written(2, 0, "fp32", "adamw frozen", "accelerate"), 1, 0),
    *_read(2, 1, "10", "fp32", "lamb"),
    *_read(2, 3, "12", "fp32", "lamb"),
    *_read(2, 2, "01", "bf16", "lamb"),
    *_read(2, 1, "10 11", "bf16", "muon"),
    *_read(2, 2, "01 11", "bf16", "muon"),
    *_read(2, 3, "12", "bf16", "muon"),
]


def recipe_for(written: Written, *, stage: int, model: dict = MODEL) -> Recipe:
    recipe = common.recipe_for(written.backend, stage, written.precision, model=model).model_dump(exclude_unset=True)
    recipe["stages"]["pretrain"] |= {"optimizer": OPTIMIZERS[written.optimizer], "ema": {"decay": 0.7}}
    return Recipe.model_validate(recipe)


def fresh(written: Written, ranks: Ranks, *, stage: int, model: dict = MODEL, start: float = 1.0):
    """An engine; `start` multiplies the weights that it starts from."""
    recipe = recipe_for(written, stage=stage, model=model)
    plan = common.plan_for(ranks.place.world_size, accumulation=2)
    built = common.build_model(recipe)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(start)
    engine = open_engine(recipe, stage="pretrain", plan=plan, model=built, ranks=ranks)
    return engine, plan


def identity(written: Written) -> dict:
    return {
        "backend": written.backend,
        "zero_stage": written.stage,
        "precision": written.precision,
        "processes": written.world,
    }


def torch_optimizer(engine):
    """AdamW or SGD itself, below whatever is wrapped around it."""
    if not hasattr(engine, "_engine"):
        return engine.optimizer
    return getattr(engine._engine.optimizer, "optimizer", engine._engine.optimizer)


def frozen(engine) -> dict[str, torch.Tensor]:
    """What is not trained, as the stage's model gets it."""
    weights = engine.weights()
    return {name: weights[name] for name, p in engine.module.named_parameters() if not p.requires_grad}


def own(state: dict) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim]


def full_state(engine, *, stage: int, moments: tuple[str, ...] | None) -> dict[str, dict[str, torch.Tensor]]:
    """Master weights and moments, whole, by the libraries' own means: nothing of `engine.portable` is used."""
    inner = torch_optimizer(engine)
    parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if stage == 0:
        masters = {
            name: master
            for group in inner.param_groups
            for name, master in zip(group["param_names"], group["params"], strict=True)
        }
        return {
            name: {"weight": masters[name].detach().clone()}
            | {
                moment: inner.state[masters[name]][moment].clone()
                for moment in moments or own(inner.state[masters[name]])
            }
            for name in parameters
        }
    if stage in (1, 2):
        engine._engine.optimizer._hp_optimizer_states_linked = False
        engine._engine.optimizer._lazy_init_hp_params_optimizer_state()
    kept = dict.fromkeys(parameters, moments or ())
    if moments is None:  # of its bucket
        for group, bucket in zip(inner.param_groups, inner._buckets, strict=True):
            kept |= {name: tuple(own(inner.state[group["params"][0]])) for name, _ in bucket}
    return {
        name: {"weight": safe_get_full_fp32_param(p).detach().clone()}
        | {moment: safe_get_full_optimizer_state(p, moment).clone() for moment in kept[name]}
        for name, p in parameters.items()
    }


def computing_weights(engine, *, stage: int) -> dict[str, torch.Tensor]:
    """The weights that the forward pass uses, whole."""
    gathered = (
        deepspeed.zero.GatheredParameters(list(engine.module.parameters())) if stage == 3 else contextlib.nullcontext()
    )
    with gathered:
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def numbers(engine) -> dict:
    """Counters: of the optimizer's steps on every tensor that it moves, and DeepSpeed's; and types of the moments."""
    inner = torch_optimizer(engine)
    steps = [float(state["step"]) for state in (*inner.state.values(), *inner.param_groups) if "step" in state]
    counted = getattr(engine, "_engine", None)
    names = ("global_steps", "global_samples", "skipped_steps") if counted else ()
    types = {(key, str(state[key].dtype)) for state in inner.state.values() for key in own(state)}
    return {"steps": sorted(set(steps)), "types": types, **{name: getattr(counted, name) for name in names}}


def losses(engine, ranks, plan, steps, **how) -> list[float]:
    return [row["loss"] for row in common.run_steps(engine, ranks, plan, steps, **how)]


def averages(engine) -> dict[str, torch.Tensor]:
    """The moving average of the weights, whole."""
    with engine.averaged():
        return engine.weights()


AFTER = range(STEPS_BEFORE + 1, STEPS_BEFORE + 1 + STEPS_AFTER)


def write_case(written: Written, ranks: Ranks, folder: Path) -> dict:
    engine, plan = fresh(written, ranks, stage=written.stage, start=1.1)
    losses(engine, ranks, plan, range(STEPS_BEFORE))
    losses(engine, ranks, plan, [STEPS_BEFORE], poison_rank=ranks.place.world_size - 1)
    common.write_state(engine, folder, ranks=ranks)
    result = {
        "state": full_state(engine, stage=written.stage, moments=moments_of(written.optimizer)),
        "numbers": numbers(engine),
        "averages": averages(engine),
        "frozen": frozen(engine),
    }
    ranks.barrier()
    if ranks.place.is_main:
        (folder / "written").touch()
    result["losses"] = losses(engine, ranks, plan, AFTER)
    result["later averages"] = averages(engine)
    engine.close()  # with ZeRO 3's linear layer, which rounds otherwise
    return result


def has_native(read: Read) -> bool:
    """Whether the engine's own loader can read it: the same cut, and nothing frozen, which it would round."""
    same = (read.world, read.stage) == (read.written.world, read.written.stage)
    return same and "frozen" not in read.written.optimizer


def read_case(read: Read, ranks: Ranks, folder: Path) -> dict:
    written = read.written
    until = time.monotonic() + WAIT_SECONDS
    while not (folder / "written").exists():
        assert time.monotonic() < until, f"nobody wrote {folder}"
        time.sleep(0.05)
    engine, plan = fresh(written, ranks, stage=read.stage)
    engine.load(folder, written=identity(written))
    result = {
        "computing": computing_weights(engine, stage=read.stage),
        "state": full_state(engine, stage=read.stage, moments=moments_of(written.optimizer)),
        "numbers": numbers(engine),
        "averages": averages(engine),
        "frozen": frozen(engine),
        "decays": common.weight_decays(engine),
        "losses": losses(engine, ranks, plan, AFTER),
        "weights": engine.weights(),
        "later averages": averages(engine),
    }
    if has_native(read):
        native, _ = fresh(written, ranks, stage=read.stage)
        if hasattr(native, "_engine"):  # DeepSpeed's own loader, as the oracle
            native._engine.load_checkpoint(str(folder), tag="deepspeed")
        else:
            native.load(folder, written=identity(written))
        result["native"] = {"losses": losses(native, ranks, plan, AFTER), "weights": native.weights()}
        native.close()
    engine.close()
    return result


MISFITS = {"lacks": {**MODEL, "depth": 2}, "besides": {**MODEL, "position": "none"}, "instead": {**MODEL, "width": 32}}


def said_to(folder: Path, engine, **how) -> str:
    try:
        engine.load(folder, written=how)
    except UserError as error:
        return str(error)
    return ""


def refusals(ranks: Ranks, out: Path) -> dict:
    """What is said to states of another model, and of another number of processes than they are said to be of."""
    said = {}
    for stage in (0, 1, 3):
        written = Written(2, stage)
        for name, model in MISFITS.items():
            engine, _ = fresh(written, ranks, stage=2, model=model)
            before = engine.weights()
            said[stage, name] = said_to(out / str(written), engine, **identity(written))
            after = engine.weights()
            assert all(torch.equal(before[name], after[name]) for name in before)
        if stage:
            engine, _ = fresh(written, ranks, stage=2)
            said[stage, "processes"] = said_to(out / str(written), engine, **{**identity(written), "processes": 3})
    return said


ALONE = [Written(1, 0), Written(1, 1), Written(1, 2, "bf16"), Written(1, 3)]  # every stage


def poisoned(ranks: Ranks, out: Path) -> dict:
    """What is said to states with a command in them, in each file in turn; and whether it ran."""
    said = {}
    for written in ALONE:
        engine, _ = fresh(written, ranks, stage=written.stage)
        for file in sorted((out / str(written)).rglob("*.pt")):
            folder, ran = out / f"poisoned {written} {file.name}", out / f"ran {written} {file.name}"
            shutil.copytree(out / str(written), folder)
            content = torch.load(file, weights_only=False)
            torch.save({**content, "more": common.Canary(ran)}, folder / file.relative_to(out / str(written)))
            said[written.stage, file.name] = (said_to(folder, engine, **identity(written)), ran.exists())
    return said


def run_rank(out: Path, world_size: int, rank: int) -> None:
    torch.set_num_threads(1)
    meeting = out / f"meeting-{world_size}"
    meeting.mkdir(exist_ok=True)
    ranks = Ranks(
        Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=meeting),
        timeout_seconds=WAIT_SECONDS,
    )
    results = {}
    for case in (case for case in WRITTEN if case.world == world_size):
        (out / str(case)).mkdir(exist_ok=True)
        ranks.barrier()
        results[case] = write_case(case, ranks, out / str(case))
    for case in (case for case in READ if case.world == world_size):
        results[case] = read_case(case, ranks, out / str(case.written))
    if world_size == 1:
        results["refusals"] = refusals(ranks, out)
        results["poisoned"] = poisoned(ranks, out)
    if rank == 0:
        torch.save({str(case): result for case, result in results.items()}, out / f"world-{world_size}.pt")
    ranks.leave()


def main() -> None:
    out = Path(sys.argv[1])
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=run_rank, args=(out, world_size, rank), daemon=True)
        for world_size in (1, 2, 3)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    while any(process.exitcode is None for process in processes):
        time.sleep(0.1)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            raise SystemExit(1)


if __name__ == "__main__":
    main()
