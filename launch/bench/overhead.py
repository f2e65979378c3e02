"""Measure the engine's overhead over plain torch without a GPU: operations, waits, bytes, collectives, CPU time.

Run `python -m shardvit.launch.bench.overhead`; output in records/overhead.txt; five minutes on two cores. All but the
CPU time (the minimum over many steps that alternate with plain torch's) are exact, held to their bounds by
tests/launch/bench/test_overhead.py.

Overhead: in backward, operations beyond plain torch's; in the step, all operations. Plain torch is the same model in
the same dtype with fused AdamW, without clipping or checks for non-finite values. Bytes sent are those of large rings.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter

from shardvit.launch.bench.measure import run_json, setting
from shardvit.launch.bench.overhead_child import BUCKET_ELEMENTS, DEPTH, WIDTH, Case, Counted

OWN = Case(zero_stage=1, precision="bf16")
"""The case that the bounds apply to: the default."""
_TIMED_STEPS = 40
_LIMIT_SECONDS = 600
COMPILED = Case(1, "bf16", engine={"compile": "blocks"}, timed_steps=_TIMED_STEPS)
_CASES = (
    *(Case(stage, precision, timed_steps=_TIMED_STEPS) for precision in ("bf16", "fp32") for stage in (0, 1, 2, 3)),
    COMPILED,
    *(Case(stage, "bf16", ranks=2) for stage in (0, 1, 2, 3)),
    Case(1, "bf16", ranks=2, accumulation=2),
    Case(1, "bf16", ranks=2, engine={"overlap": "off"}),
    *(Case(stage, "bf16", ranks=4) for stage in (0, 1)),
)


@dataclass(frozen=True)
class Bound:
    """A quantity of `OWN` and its bound."""

    what: str
    value: float
    most: float
    exact: bool = True  # independent of the machine's load

    @property
    def met(self) -> bool:
        return self.value <= self.most


def bounds_of(one: Counted) -> list[Bound]:
    """Bounds for one process under `OWN`, in a step that logs nothing."""
    found = [
        Bound("operations outside the model", one.in_forward + one.in_backward + one.in_step, 650),
        Bound("of them in the step", one.in_step, 30),
        Bound("waits for the device", sum(one.waits.values()), 0),
        Bound("waits of moving a batch to the device", sum(one.input_waits.values()), 0),
        Bound("keys of DeepSpeed that wait", len(one.synchronising_keys), 0),
        Bound("bytes allocated a parameter", one.allocated_bytes / one.parameters, 6.1),
    ]
    if one.cpu_ms and one.plain_cpu_ms:
        found.append(Bound("CPU time to plain torch's", one.cpu_ms.whole / one.plain_cpu_ms.whole, 1.4, exact=False))
    return found


def bounds_of_sending(one: Counted, *, ranks: int) -> list[Bound]:
    """Bounds for one of several processes under `OWN`."""
    return [Bound(f"bytes sent a parameter, {ranks} processes", sent_bytes_per_parameter(one, ranks=ranks), 6.01)]


def bounds_of_compiling(one: Counted) -> list[Bound]:
    """Bounds for one process under `OWN` with compiled blocks."""
    return [
        Bound("graph breaks", one.graph_breaks, 0),
        Bound("graphs of blocks, in training", one.graphs, 2),
    ]


def sent_bytes_per_parameter(one: Counted, *, ranks: int) -> float:
    """Bytes sent in a ring of many ranks: those of these n ranks times n / (n - 1)."""
    if ranks == 1:
        return 0.0
    return sum(sent for _, _, sent in one.collectives) * ranks / (ranks - 1) / one.parameters


def run_case(case: Case) -> list[Counted]:
    """Count each rank in a fresh process on this machine; RuntimeError with its output if one fails."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(case.ranks) as pool:

        def count(rank: int) -> Counted:
            arguments = ("shardvit.launch.bench.overhead_child", json.dumps(asdict(case)), folder, str(rank))
            found = run_json(*arguments, env=environment, timeout_seconds=_LIMIT_SECONDS)
            return TypeAdapter(Counted).validate_python(found)

        return list(pool.map(count, range(case.ranks)))


def main() -> None:
    """Measure all cases and print the tables."""
    parser = argparse.ArgumentParser(description="What the engine costs beside plain torch.")
    parser.add_argument("--json", type=Path, help="also write every count to this file")
    arguments = parser.parse_args()
    print(f"{setting('torch', 'deepspeed')}, no GPU")
    print(f"ViT of depth {DEPTH} and width {WIDTH}, AdamW with two decay settings, clipping at 1.0, 1 thread a process")
    print(f"buckets of {BUCKET_ELEMENTS:,} elements", flush=True)
    found = [(case, run_case(case)) for case in _CASES]
    print("\n".join(report(found)))
    if arguments.json:
        rows = [{"case": asdict(case), "ranks": [asdict(each) for each in ranks]} for case, ranks in found]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def report(found: Sequence[tuple[Case, Sequence[Counted]]]) -> Iterator[str]:
    """Format the bounds, then the tables."""
    own = {case.ranks: ranks[0] for case, ranks in found if _is_own(case)}
    bounds = bounds_of(own[1])
    for case, (one, *_) in found:
        bounds += bounds_of_compiling(one) if case.compiles else []
    for ranks, one in own.items():
        if ranks > 1:
            bounds += bounds_of_sending(one, ranks=ranks)
    yield f"\n{OWN.name}, a step that does not log"
    yield f"{'':44}{'counted':>10}{'bound':>10}"
    for each in bounds:
        yield f"{each.what:44}{_short(each.value):>10}{_short(each.most):>10}  {'' if each.met else 'MISSED'}".rstrip()

    yield "\nOne process; operations that plain torch does not do, and the ratio of CPU times"
    yield f"{'':16}  forward backward    step  waits bytes/par. CPU ms: passes, step; plain's   ratio"
    for case, (one, *_) in found:
        if case.ranks == 1:
            times = ""
            if (ours := one.cpu_ms) and (plain := one.plain_cpu_ms):
                times = f"{ours.passes:9.1f}{ours.step:7.1f}{plain.passes:9.1f}{plain.step:7.1f}"
                times += f"{ours.whole / plain.whole:7.2f}"
            counts = (
                f"{one.in_forward:9,}{one.in_backward:9,}{one.in_step:8,}"
                f"{sum(one.waits.values()):7}{one.allocated_bytes / one.parameters:11.1f}"
            )
            yield f"{case.name:16}{'   (not counted)' if case.compiles else counts:44}{times}"
    yield "\nWhat waits"
    for case, (one, *_) in found:
        if case.ranks == 1 and not case.compiles:
            reasons = [f"{number} x {reason}" for reason, number in one.waits.items()]
            yield f"{case.name:16}" + ("; ".join([*reasons, *one.synchronising_keys]) or "nothing")

    yield "\nSeveral processes; the collectives of rank 0's step in their order, and bytes sent a parameter in a ring"
    for case, (one, *_) in found:
        if case.ranks > 1:
            more = f", {case.accumulation} micro-batches" if case.accumulation > 1 else ""
            sent = sent_bytes_per_parameter(one, ranks=case.ranks)
            yield f"{case.name}, {case.ranks} processes{more}: {sent:.2f} bytes; " + ", ".join(_runs(one.collectives))


def _is_own(case: Case) -> bool:
    mine = (case.zero_stage, case.precision, case.engine, case.accumulation)
    return mine == (OWN.zero_stage, OWN.precision, OWN.engine, 1)


def _runs(collectives: Iterable[tuple[str, int, float]]) -> Iterator[str]:
    for name, group in groupby(collectives, key=lambda each: each[0]):
        sizes = [num_bytes for _, num_bytes, _ in group]
        yield f"{len(sizes)} {name} of {sum(sizes):,} bytes"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


if __name__ == "__main__":
    main()
