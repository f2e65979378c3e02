"""Measure the engine's overhead over plain torch without a GPU: operations, waits, bytes, collectives, CPU time.

Run `python -m shardvit.launch.bench.overhead`; output in records/overhead.txt; eight minutes on two quiet cores. All
but the CPU time (the minimum over many steps that alternate with plain torch's) are exact: `ROWS` has their bounds,
which the report and tests/launch/bench/test_overhead.py hold them to.

Overhead: in forward and backward, operations beyond plain torch's; in the step, all operations. Plain torch is the same
model in the same dtype with fused AdamW, without dropout, clipping, checks for non-finite values, or other processes.
Bytes sent are those of large rings. CPU time is that of all of a process's threads: with several processes gloo's, too,
which copy and send what NCCL moves without them; beside it that with a process group that sends nothing.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from shardvit.launch.bench.evaluation_memory import kept_bytes_per_image
from shardvit.launch.bench.measure import run_json, setting
from shardvit.launch.bench.overhead_child import BUCKET_ELEMENTS, DEPTH, WIDTH, Case, Counted, Spent

_TIMED_STEPS = {1: 24, 2: 20, 4: 12}  # by processes
_LIMIT_SECONDS = 1800  # for all rows of a number of processes; quiet, they take up to three minutes
EVALUATION_BYTES = 150  # kept an image: its answers, and no batch

Quantity = Literal[
    "operations", "in forward", "in backward", "in the step", "waits", "waits of a batch", "bytes made a parameter",
    "bytes sent a parameter", "CPU to plain torch's", "with nothing sent", "graph breaks", "graphs",
]  # fmt: skip
_IN_WORDS: dict[Quantity, str] = {"operations": "operations outside the model", "waits": "waits for the device"}
_INEXACT: tuple[Quantity, ...] = ("CPU to plain torch's", "with nothing sent")  # they depend on the machine's load


@dataclass(frozen=True)
class Bounded:
    """A case, and the most that its quantities may come to."""

    case: Case
    most: Mapping[Quantity, float] = field(default_factory=dict)

    def missed(self, one: Counted, *, exact_alone: bool = False) -> dict[Quantity, float]:
        """The quantities above their bounds."""
        return {
            name: value
            for name, most in self.most.items()
            if (value := quantity(name, one, case=self.case)) is not None
            and value > most
            and not (exact_alone and name in _INEXACT)
        }


_QUIET: dict[Quantity, float] = {"waits": 0, "waits of a batch": 0}
_FAST: dict[Quantity, float] = {
    **_QUIET,
    "operations": 150,
    "bytes sent a parameter": 4.01,
    "CPU to plain torch's": 1.2,
    "with nothing sent": 1.2,
}
_ALONE: dict[Quantity, float] = {**_FAST, "in the step": 30, "bytes made a parameter": 6.1}
_ON_DEVICE: dict[Quantity, float] = {**_QUIET, "in the step": 400}
_PER_BLOCK = 10 * DEPTH

DEFAULT = Case(zero_stage=1, precision="bf16")
"""The engine that a recipe gets if it names none."""
COMPILED = Case(1, "bf16", engine={"compile": "blocks"})
_OWN_FILE = Path(__file__).with_name("own_optimizer.py")
_OWN = f"{_OWN_FILE}@{sha256(_OWN_FILE.read_bytes()).hexdigest()}:sgd"
_REGULARISED = Case(
    1,
    "bf16",
    stage={"dropout": 0.1, "stochastic_depth": 0.1, "augment": {"mixup_alpha": 0.2}},
    label="dropout, stochastic depth, mixup",
)


def _rows(ranks: int) -> Iterator[Bounded]:
    alone = ranks == 1
    yield Bounded(DEFAULT, _ALONE if alone else _FAST)
    if not alone:
        yield Bounded(Case(1, "bf16", engine={"overlap": "off"}), _FAST)
    yield Bounded(Case(2, "bf16"), _FAST)
    yield Bounded(Case(0, "bf16"), _QUIET)
    yield Bounded(Case(0, "bf16", optimizer={"first_moment": "bf16"}), _ON_DEVICE)
    for name in ("adafactor", "muon", "lamb"):
        yield Bounded(Case(0, "bf16", optimizer={"name": name}, label=name), _ON_DEVICE)
    for name, joined in (("muon", 4.0), ("lamb", 0.0)):  # bytes that a process sends of its pieces
        most: dict[Quantity, float] = {
            **_ON_DEVICE,
            "operations": 220,
            "bytes sent a parameter": 0 if alone else 4.04 + joined / ranks,
        }
        yield Bounded(Case(1, "bf16", optimizer={"name": name}, label=name), most)
    yield Bounded(Case(1, "bf16", optimizer={"layer_decay": 0.75}), {**_FAST, "operations": 60} if alone else _FAST)
    yield Bounded(_REGULARISED, {**_QUIET, "in forward": _PER_BLOCK, "in backward": _PER_BLOCK + (0 if alone else 150)})
    if ranks < 4:
        yield Bounded(Case(3, "bf16"))
    if ranks == 2:
        yield Bounded(Case(1, "bf16", engine={"offload": "optimizer"}))
        yield Bounded(Case(1, "fp32"), {**_FAST, "bytes sent a parameter": 8.01})
        yield Bounded(Case(1, "bf16", accumulation=2), _FAST)
    if alone:
        yield Bounded(Case(0, "bf16", optimizer={"name": "custom", "custom": _OWN}, label="an own optimizer"))
        for stage in (0, 1, 2, 3):
            yield Bounded(Case(stage, "fp32"), _QUIET if stage < 3 else {})
        yield Bounded(COMPILED, {"graph breaks": 0, "graphs": 2, "CPU to plain torch's": 1.2})


ROWS = tuple(
    Bounded(replace(row.case, ranks=ranks, timed_steps=_TIMED_STEPS[ranks]), row.most)
    for ranks in (1, 2, 4)
    for row in _rows(ranks)
)


def quantity(name: Quantity, one: Counted, *, case: Case) -> float | None:
    """A quantity of a rank; None: not measured."""
    measures: dict[Quantity, Callable[[], float | None]] = {
        "operations": lambda: one.in_forward + one.in_backward + one.in_step,
        "in forward": lambda: one.in_forward,
        "in backward": lambda: one.in_backward,
        "in the step": lambda: one.in_step,
        "waits": lambda: sum(one.waits.values()),
        "waits of a batch": lambda: sum(one.input_waits.values()),
        "bytes made a parameter": lambda: one.allocated_bytes / one.parameters,
        "bytes sent a parameter": lambda: sent_bytes_per_parameter(one, ranks=case.ranks),
        "CPU to plain torch's": lambda: _ratio(one.cpu_ms, one.plain_cpu_ms),
        "with nothing sent": lambda: _ratio(one.unsent_cpu_ms, one.plain_cpu_ms),
        "graph breaks": lambda: one.graph_breaks,
        "graphs": lambda: one.graphs,
    }
    return measures[name]()


def sent_bytes_per_parameter(one: Counted, *, ranks: int) -> float:
    """Bytes sent in a ring of many ranks: those of these n ranks times n / (n - 1)."""
    if ranks == 1:
        return 0.0
    return sum(sent for _, _, sent in one.collectives) * ranks / (ranks - 1) / one.parameters


def _ratio(ours: Spent | None, plain: Spent | None) -> float | None:
    return ours.whole / plain.whole if ours and plain else None


def run_cases(cases: Sequence[Case]) -> list[list[Counted]]:
    """Count the cases, all with the same number of ranks, one after the other in one set of fresh processes on this
    machine; for each case its ranks. RuntimeError with a process's output if it fails."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    (ranks,) = {case.ranks for case in cases}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:

        def count(rank: int) -> list[Counted]:
            given = json.dumps([asdict(case) for case in cases])
            arguments = ("shardvit.launch.bench.overhead_child", given, folder, str(rank))
            found = run_json(*arguments, env=environment, timeout_seconds=_LIMIT_SECONDS)
            return TypeAdapter(list[Counted]).validate_python(found)

        return [list(each) for each in zip(*pool.map(count, range(ranks)), strict=True)]


def main() -> None:
    """Measure all cases and print the tables."""
    parser = argparse.ArgumentParser(description="What the engine costs beside plain torch.")
    parser.add_argument("--json", type=Path, help="also write every count to this file")
    arguments = parser.parse_args()
    print(f"{setting('torch', 'deepspeed')}, no GPU")
    print(f"ViT of depth {DEPTH} and width {WIDTH}, AdamW with two decay settings, clipping at 1.0, 1 thread a process")
    print(f"buckets of {BUCKET_ELEMENTS:,} elements", flush=True)
    counted: list[list[Counted]] = []
    for _, rows in groupby(ROWS, key=lambda row: row.case.ranks):
        counted += run_cases([row.case for row in rows])
    print("\n".join(report(ROWS, counted, evaluation_bytes=kept_bytes_per_image())))
    if arguments.json:
        found = zip(ROWS, counted, strict=True)
        content = [{"case": asdict(row.case), "ranks": [asdict(each) for each in ranks]} for row, ranks in found]
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def report(rows: Sequence[Bounded], counted: Sequence[Sequence[Counted]], *, evaluation_bytes: float) -> Iterator[str]:
    """Format the default's worst, the bounds, then the tables. Of several processes rank 0's counts are shown."""
    found = [(row, ranks[0]) for row, ranks in zip(rows, counted, strict=True)]
    width = max(len(row.case.name) for row in rows) + 2
    yield from _worst_of_the_default(found)
    yield "\nBounds, in a step that does not log: counted (most)"
    for row, one in found:
        missed = row.missed(one)
        said = (
            f"{name} {_short(value)} ({_short(most)}){' MISSED' if name in missed else ''}"
            for name, most in row.most.items()
            if (value := quantity(name, one, case=row.case)) is not None
        )
        if row.most:
            yield f"{row.case.name:{width}}" + ", ".join(said)
    over = " MISSED" if evaluation_bytes > EVALUATION_BYTES else ""
    yield f"{'an evaluation':{width}}bytes kept an image {_short(evaluation_bytes)} ({EVALUATION_BYTES}){over}"

    for title, here in (("One process", [1]), ("Several processes", [2, 4])):
        yield f"\n{title}; operations that plain torch does not do, and the ratio of CPU times"
        yield (
            f"{'':{width}}  forward backward    step  waits bytes/par. CPU ms: passes, step; plain's   ratio"
            + ("  nothing sent" if here != [1] else "")
        )
        for row, one in found:
            if row.case.ranks in here:
                yield f"{row.case.name:{width}}" + _cells(row.case, one)
    yield "\nWhat waits: in the step, and for what goes to the device in each step"
    for row, one in found:
        if not row.case.compiles:
            reasons = [
                f"{number} x {reason}" for each in (one.waits, one.input_waits) for reason, number in each.items()
            ]
            yield f"{row.case.name:{width}}" + ("; ".join(reasons) or "nothing")
    yield "\nSeveral processes; the collectives of rank 0's step in their order, and bytes sent a parameter in a ring"
    for row, one in found:
        if row.case.ranks > 1:
            sent = sent_bytes_per_parameter(one, ranks=row.case.ranks)
            yield f"{row.case.name}: {sent:.2f} bytes; " + ", ".join(_runs(one.collectives))


def _worst_of_the_default(found: Sequence[tuple[Bounded, Counted]]) -> Iterator[str]:
    own = [(row.case, one) for row, one in found if replace(row.case, ranks=1, timed_steps=0) == DEFAULT]
    said: list[str] = []
    for name in ("operations", "waits", "bytes sent a parameter", *_INEXACT):
        values = {case.ranks: quantity(name, one, case=case) for case, one in own}
        known = {ranks: value for ranks, value in values.items() if value is not None}
        if known:
            worst = max(known, key=known.__getitem__)
            said.append(f"{_short(known[worst])} {_IN_WORDS.get(name, name)} ({worst} process{'es' * (worst > 1)})")
    numbers = ", ".join(str(case.ranks) for case, _ in own)
    yield f"\nWorst of the default, {DEFAULT.name}, over {numbers} processes: " + ", ".join(said)


def _cells(case: Case, one: Counted) -> str:
    counts = (
        f"{one.in_forward:9,}{one.in_backward:9,}{one.in_step:8,}"
        f"{sum(one.waits.values()):7}{one.allocated_bytes / one.parameters:11.1f}"
    )
    line = f"{'   (not counted)' if case.compiles else counts:44}"
    if (ours := one.cpu_ms) and (plain := one.plain_cpu_ms):
        line += f"{ours.passes:9.1f}{ours.step:7.1f}{plain.passes:9.1f}{plain.step:7.1f}{_ratio(ours, plain):7.2f}"
        line += f"{unsent:14.2f}" if (unsent := _ratio(one.unsent_cpu_ms, plain)) else ""
    return line


def _runs(collectives: Iterable[tuple[str, int, float]]) -> Iterator[str]:
    for name, group in groupby(collectives, key=lambda each: each[0]):
        sizes = [num_bytes for _, num_bytes, _ in group]
        yield f"{len(sizes)} {name} of {sum(sizes):,} bytes"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


if __name__ == "__main__":
    main()
