"""Forecast goodput: the share of wall time that trains, for 64 to 1,024 GPUs with a failure an hour.

Run `python -m shardvit.launch.bench.goodput`; output in records/goodput.txt. What a failure costs is measured here with
small runs of real processes (`goodput_runs`), what grows with ranks is in records/scale.txt, steps and stalls are those
of `shardvit plan`, and what only a cluster has is an option with its source. The formula is Young's and Daly's
(`goodput_model`); the bar is ByteRobust's 97 % of effective training time on 9,600 GPUs (arXiv 2509.16293). Three
minutes on two cores. Does not count evaluation, waiting for data, a slow rank, or steps slowed by a background save.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardvit.data_shards.text import table
from shardvit.launch.bench.goodput_model import Saves, goodput, most_restart_seconds, youngs_interval
from shardvit.launch.bench.goodput_runs import MODELS, FailureCosts, Range, measure
from shardvit.launch.bench.measure import heading
from shardvit.launch.plan.gathering import make_plan
from shardvit.launch.plan.plan_options import PlanOptions
from shardvit.pipeline.recipe.io import load_recipe

GOAL = 0.97
RANKS = (64, 256, 1024)
_HOUR = 3600.0
_LEAST_INTERVAL = 30.0  # seconds: more often gains little, and a background save may slow steps
_PAYS = 0.005  # of the time: what restarting within processes would have to save
# File operations of 1,024 ranks (records/scale.txt): for each shard that is opened; when a rank dies.
_SHARD_OPERATIONS, _DEATH_OPERATIONS, _SCALE_RANKS = 1.008, 5_934, 1024
_DIGESTED_GB_PER_SECOND = 0.5  # by a core, at a restart (`checkpoint.store`)


@dataclass(frozen=True)
class Assumed:
    """What cannot be measured here; options of the same names."""

    gpu: str = "h100"
    nccl_seconds: float = 4.4
    nccl_rank_seconds: float = 0.0125
    first_step_seconds: float = 20.0
    far_start: float = 2.0
    read_gb: float = 10.0
    client_gb: float = 1.0
    shards: float = 14_000.0
    operations: float = 10_000.0
    hang_share: float = 0.0
    hang_seconds: float = 900.0
    queue_seconds: float = 0.0


_SOURCES = {
    "gpu": "steps and stalls of `shardvit plan`, computed",
    "nccl_seconds": "a line through two measured points, a communicator of 8 GPUs (4.5 s)",
    "nccl_rank_seconds": "... and of 128 (6.0 s): NVIDIA/nccl issue 534, 2021; for each rank",
    "first_step_seconds": "CUDA context, kernels from the run's cache: a guess, which `make gpu` is to replace",
    "far_start": "times a start's CPU seconds here: libraries on a file server, read by all: a guess",
    "read_gb": "GB/s of the file server for all ranks: a guess, a tenth of a large Lustre's",
    "client_gb": "GB/s of one process, reading or writing: a guess, of one stream",
    "shards": "of the training set: ImageNet-21k's 14 million images, a thousand in each",
    "operations": "file operations a second of the file server: a guess",
    "hang_share": "of the failures hang instead of ending a process (see the last table)",
    "hang_seconds": "engine.hang_seconds, the default: until a hang is ended",
    "queue_seconds": "until a requeued job starts; 0: restarted by `shardvit run --max-restarts` (see the last table)",
}


@dataclass(frozen=True)
class Setup:
    """A model on so many GPUs, by the plan."""

    model: str  # key of MODELS
    ranks: int
    step_seconds: float
    stall_seconds: float  # of a save
    first_bytes: int  # that rank 0 writes
    checkpoint_bytes: int
    recipe_steps: int  # between saves, as the recipe has it
    total_steps: int


def setup(model: str, *, ranks: int, gpu: str) -> Setup:
    """Ask the plan."""
    stage = make_plan(load_recipe(MODELS[model]), PlanOptions(gpus=ranks, gpu=gpu)).stages[0]
    assert stage.time is not None and stage.saving is not None
    return Setup(
        model=model,
        ranks=ranks,
        step_seconds=stage.time.step_seconds,
        stall_seconds=stage.saving.stall_seconds or 0.0,
        first_bytes=stage.saving.process_bytes,
        checkpoint_bytes=stage.disk.checkpoint_bytes,
        recipe_steps=stage.plan.save_steps,
        total_steps=stage.plan.total_steps,
    )


def restart(at: Setup, measured: FailureCosts, assumed: Assumed) -> dict[str, float]:
    """Seconds from a failure to the first step again, by what takes them."""
    gb = at.checkpoint_bytes / 1e9
    return {
        "noticing": measured.noticing.least
        + assumed.hang_share * assumed.hang_seconds
        + _DEATH_OPERATIONS * at.ranks / _SCALE_RANKS / assumed.operations,
        "ending, pause": measured.ending.least + assumed.queue_seconds,
        "imports, opening": measured.start_cpu.least * assumed.far_start,
        "shards": _SHARD_OPERATIONS * assumed.shards / assumed.operations,
        "NCCL": assumed.nccl_seconds + assumed.nccl_rank_seconds * at.ranks,
        "model": measured.building[at.model],
        "restoring": gb / assumed.read_gb
        + at.first_bytes / 1e9 / assumed.client_gb
        + gb / at.ranks / _DIGESTED_GB_PER_SECOND,
        "first step": assumed.first_step_seconds,
    }


def saves(at: Setup, measured: FailureCosts, assumed: Assumed, *, interval: float) -> Saves:
    """What saving costs at an interval."""
    bare = at.first_bytes / 1e9 * (measured.writing_cpu + 2 / assumed.client_gb)  # written and read back
    commit = bare + at.checkpoint_bytes / 1e9 * 2 / assumed.read_gb
    stall = at.stall_seconds + measured.stall.least
    if commit > interval + stall:  # the next save waits for it
        stall = commit - interval
    return Saves(interval=interval, stall=stall, commit=commit)


def advised(at: Setup, measured: FailureCosts, assumed: Assumed, *, failure_seconds: float) -> float:
    """Young's interval, if that is more than half a minute."""
    stall = saves(at, measured, assumed, interval=_HOUR).stall
    return max(_LEAST_INTERVAL, youngs_interval(stall=stall, failure_seconds=failure_seconds))


@dataclass(frozen=True)
class Forecast:
    """Goodput at one setup and interval."""

    saves: Saves
    restart_seconds: float
    goodput: float


def forecast(
    at: Setup,
    measured: FailureCosts,
    assumed: Assumed,
    *,
    failure_seconds: float = _HOUR,
    interval: float | None = None,
) -> Forecast:
    """`interval`: default, what is advised."""
    every = interval or advised(at, measured, assumed, failure_seconds=failure_seconds)
    costs = saves(at, measured, assumed, interval=every)
    seconds = sum(restart(at, measured, assumed).values())
    return Forecast(costs, seconds, goodput(costs, restart_seconds=seconds, failure_seconds=failure_seconds))


def report(setups: Sequence[Setup], measured: FailureCosts, assumed: Assumed) -> Iterator[str]:
    """All tables."""
    yield from _measured_lines(measured)
    yield "\nAssumed (each is an option):\n"
    rows = [[f"--{name.replace('_', '-')} {getattr(assumed, name)}", words] for name, words in _SOURCES.items()]
    yield table(rows, align="ll", width=116)
    yield "\nSeconds from a failure to the first step again:\n"
    parts = [(at, restart(at, measured, assumed)) for at in setups]
    rows = [["", *parts[0][1], "in all"]]
    rows += [[_name(at), *(f"{each:.1f}" for each in own.values()), f"{sum(own.values()):.0f}"] for at, own in parts]
    yield table(rows, align="lr")
    yield "\nGoodput with a failure an hour, by the interval between saves:\n"
    yield from _interval_lines(setups, measured, assumed)
    yield f"\nEach second of a restart, of committing, or of work lost costs 1/3600 = {1 / _HOUR:.3%}.\n"
    yield from _sensitivity_lines(setups[-1], measured, assumed)
    yield ""
    yield from _within_lines(setups, measured, assumed)
    yield ""
    yield from _verdict(setups, measured, assumed)


def _measured_lines(measured: FailureCosts) -> Iterator[str]:
    yield (
        f"Measured here: 2 processes on gloo, one killed {measured.failures} times. Seconds: the least (and the "
        "median), as other\nprograms may run on these cores:\n"
    )

    def row(words: str, found: Range) -> list[str]:
        return [words, f"{found.least:.2f} ({found.median:.2f})"]

    rows = [
        row("from the kill of a process until another one has noticed", measured.noticing),
        row("from there until new processes start, of which 5 are a pause", measured.ending),
        row("from a process's start to its first step", measured.start),
        row("... of that, Python and imports", measured.imports),
        row("... CPU seconds of all of it", measured.start_cpu),
        row("stall of a tiny save: agreement and bookkeeping", measured.stall),
        *([f"building ViT-{key}, CPU seconds", f"{each:.1f}"] for key, each in measured.building.items()),
        ["writing 1 GB as a checkpoint by one process, flushed and read back", f"{measured.writing:.1f}"],
        ["... of that, CPU seconds: two digests", f"{measured.writing_cpu:.1f}"],
    ]
    yield table(rows, align="lr")


def _interval_lines(setups: Sequence[Setup], measured: FailureCosts, assumed: Assumed) -> Iterator[str]:
    fixed = (60.0, 120.0, 300.0, 600.0)
    rows = [["", "default (10 %)", "recipe's 1,000 steps", "advised", *(f"{each:g} s" for each in fixed)]]
    for at in setups:
        default, recipe = at.total_steps * at.step_seconds / 10, at.recipe_steps * at.step_seconds
        cells = [_name(at)]
        for every in (default, recipe, None, *fixed):
            found = forecast(at, measured, assumed, interval=every)
            length = "" if every in fixed else f"{found.saves.interval:,.0f} s: "
            cells.append(f"{length}{found.goodput:.2%}")
        rows.append(cells)
    yield table(rows, align="lr")


def changes(assumed: Assumed) -> Mapping[str, tuple[Assumed, float]]:
    """What else may hold: assumptions, and seconds between failures."""

    def but(**others: float) -> tuple[Assumed, float]:
        return replace(assumed, **others), _HOUR

    return {
        "as above": but(),
        "NCCL takes 150 s (thousands of GPUs before 2.23: issue 1156)": but(nccl_seconds=150.0, nccl_rank_seconds=0.0),
        "imports take 10 times as long as here": but(far_start=10.0),
        "the first step takes 120 s (nothing compiled is kept)": but(first_step_seconds=120.0),
        "the file server gives a tenth": but(read_gb=assumed.read_gb / 10, operations=assumed.operations / 10),
        "one process reads and writes 0.2 GB/s": but(client_gb=0.2),
        "one failure in ten is a hang": but(hang_share=0.1),
        "... with engine.hang_seconds=120": but(hang_share=0.1, hang_seconds=120.0),
        "SLURM requeues the job, as `shardvit submit` has it: 121 s more": but(queue_seconds=121.0),
        "a failure every 3 hours (Llama 3, 16,384 GPUs: 419 in 54 days)": (assumed, 54 * 24 * _HOUR / 419),
        "a failure every 8 hours": (assumed, 8 * _HOUR),
    }


def _sensitivity_lines(at: Setup, measured: FailureCosts, assumed: Assumed) -> Iterator[str]:
    yield f"{_name(at)}, at the interval advised:\n"
    base = forecast(at, measured, assumed).goodput
    rows = [["", "restart, s", "save every, s", "goodput", "change", f">= {GOAL:.0%}"]]
    for what, (own, failure_seconds) in changes(assumed).items():
        found = forecast(at, measured, own, failure_seconds=failure_seconds)
        change = 100 * (found.goodput - base)
        rows.append(
            [
                what,
                f"{found.restart_seconds:.0f}",
                f"{found.saves.interval:.0f}",
                f"{found.goodput:.2%}",
                f"{change:+.2f}",
                "yes" if found.goodput >= GOAL else "NO",
            ]
        )
    yield table(rows, align="lr")


def _within_lines(setups: Sequence[Setup], measured: FailureCosts, assumed: Assumed) -> Iterator[str]:
    """Whether restarting within the surviving processes would pay."""
    parts = [restart(at, measured, assumed) for at in setups]
    imports, model = (max(own[name] for own in parts) for name in ("imports, opening", "model"))
    verdict = "pays" if imports / _HOUR > _PAYS else "does not pay"
    yield (
        f"Restarting within the surviving processes would spare imports and opening, {imports:.1f} s or "
        f"{imports / _HOUR:.2%} of the time\n(to pay: {_PAYS:.1%}): it {verdict}. They would wait for the dead one's "
        "successor to import, too, unless a process that has\nimported stands by, as launch/local/nursery.py can, "
        f"without the rest. The model, {model:.1f} s or {model / _HOUR:.2%} at most, is built\nto be overwritten: that "
        "is spared by not drawing weights that a checkpoint replaces."
    )


def _verdict(setups: Sequence[Setup], measured: FailureCosts, assumed: Assumed) -> Iterator[str]:
    found = {at: forecast(at, measured, assumed) for at in setups}
    least = min(found, key=lambda at: found[at].goodput)
    room = most_restart_seconds(found[least].saves, goal=GOAL, failure_seconds=_HOUR)
    met = "met" if found[least].goodput >= GOAL else "MISSED"
    yield (
        f"At the interval advised, at least {found[least].goodput:.2%} ({_name(least)}); goal {GOAL:.0%}: {met}; a "
        f"restart may take {max(0.0, room):.0f} s there"
    )


def _name(at: Setup) -> str:
    return f"ViT-{at.model}, {at.ranks:,} GPUs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m shardvit.launch.bench.goodput", description="The share of wall time that trains."
    )
    parser.add_argument("--failures", type=int, default=3, help="processes to kill (%(default)s)")
    for name, words in _SOURCES.items():
        kind, words = type(getattr(Assumed, name)), words.replace("%", "%%")
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=getattr(Assumed, name), help=f"{words} (%(default)s)"
        )
    given = vars(parser.parse_args(arguments))
    failures, assumed = given.pop("failures"), Assumed(**given)
    setups = [setup(model, ranks=ranks, gpu=assumed.gpu) for model in MODELS for ranks in RANKS]
    print(f"{heading('torch', 'deepspeed')}\n")
    print("\n".join(report(setups, measure(failures=failures), assumed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
