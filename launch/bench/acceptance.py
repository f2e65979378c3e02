"""Try everything that a GPU can get wrong, and report each line: pass, fail with the reason, or not run. `make gpu`.

Run `python -m shardvit.launch.bench.acceptance` in a clone: half an hour on a GPU, the same code on two cores with
`--device cpu`. It needs pytest and no network. Four parts: the tests marked `gpu` (suite), `launch.bench.gpu` (bench),
the demo, and two processes, on two GPUs over NCCL (nccl). `gpu-report.json` is written after each line, the page beside
it after each part. `--only` leaves other parts' results in an existing report; `--go-on` leaves out tests that passed
there. Exit code 1 if a line of these parts fails. Speeds below `launch.bench.gpu`'s bounds are lines, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from traceback import format_exc
from typing import TYPE_CHECKING, Any, Literal, get_args

from shardvit.launch.bench.acceptance_processes import OVER, ROOT, LineGroup, environment_for, lines_of, stop
from shardvit.launch.bench.acceptance_report import AcceptanceLine, AcceptanceReport, Part, Status, read_report
from shardvit.pipeline.budget.gpus import gpu_of_driver
from shardvit.pipeline.runs.written_by import revision

if TYPE_CHECKING:
    from shardvit.launch.bench.gpu_report import GpuResults

GROUPS = (
    LineGroup("suite", "Engines in every precision", ("tests/gpu/test_engines.py",)),
    LineGroup("suite", "No waits for the device", ("tests/gpu/test_waits.py",)),
    LineGroup("suite", "Ways to train", ("tests/gpu/test_ways.py",)),
    LineGroup("suite", "Optimizers", ("tests/gpu/test_optimizers.py",)),
    LineGroup("suite", "Snapshots, resume, other ZeRO stages", ("tests/gpu/test_saves.py",)),
    LineGroup("suite", "Memory against the plan", ("tests/gpu/test_memory.py",)),
    LineGroup(
        "suite",
        "Parts that only a GPU has: page-locked buffers, decoder, kernels",
        (
            "tests/data_shards/images/test_decode_nvimgcodec.py",
            "tests/data_shards/loading/test_device_prefetch.py",
            "tests/pipeline/engine/saved_state/test_host_copy.py",
            "tests/pipeline/kernels/test_settle.py",
            "tests/pipeline/ranks/test_phases.py",
            "tests/pipeline/using/test_predict.py",
        ),
    ),
    LineGroup("suite", "Whole runs, predict, export", ("tests/gpu/test_runs.py",)),
    LineGroup("nccl", "Two processes", ("tests/gpu/test_processes.py",)),
)
_LINE_SECONDS = {"cuda": 240.0, "cpu": 900.0}  # without a word
_MOST_SECONDS: dict[str, dict[Part, float]] = {
    "cuda": {"suite": 570, "bench": 590, "demo": 300, "nccl": 300},
    "cpu": {"suite": 3600, "bench": 3600, "demo": 1800, "nccl": 1800},
}
_FACTS = "import json, shardvit.launch.bench.acceptance_report as report; print(json.dumps(report.machine_facts()))"
_DEMO_TOP1 = 0.93  # of pre-training on digits; 0.968 to 0.988 were reached


@dataclass(frozen=True)
class Setting:
    """How the parts run."""

    device: Literal["cuda", "cpu"]
    out: AcceptanceReport
    file: Path
    passed: tuple[str, ...]  # not run again

    def deadline(self, part: Part) -> float:
        return time.monotonic() + _MOST_SECONDS[self.device][part]

    @property
    def environment(self) -> dict[str, str]:
        return environment_for(self.device)


def main() -> None:
    """Run the parts; write the report and exit with 1 if a line fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--only", type=_parts, default=get_args(Part), help=f"parts: {','.join(get_args(Part))}")
    parser.add_argument("--go-on", action="store_true", help="leave out tests that have passed in an existing report")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="FILE of FILE.json and FILE.html")
    arguments = parser.parse_args()
    if not (ROOT / "tests" / "gpu").is_dir():
        parser.error("the tests are not here: run it in a clone of the repository")
    setting = _setting(arguments, parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what ends the processes
    for part in arguments.only:
        print(f"== {part} ==", flush=True)
        for line in _guarded(part, _RUN[part](setting)):
            setting.out.put(line)
            setting.out.write(setting.file)
            said = f": {line.reason}" if line.reason else ""
            print(f"{line.status:8}{line.words}{said}", flush=True)
        setting.out.write_page(setting.file.with_suffix(".html"))
    setting.out.write(setting.file)
    counts: dict[Status, int] = {status: setting.out.counts[status] for status in get_args(Status)}
    has_failed = any(line.status == "fail" and line.part in arguments.only for line in setting.out.lines)
    print(f"\n{', '.join(f'{count} {status}' for status, count in counts.items())}")
    print(f"report  {setting.file.with_suffix('.html')}")
    sys.exit(1 if has_failed else 0)


def _guarded(part: Part, lines: Iterator[AcceptanceLine]) -> Iterator[AcceptanceLine]:
    """The lines, and one more if we fail ourselves."""
    try:
        yield from lines
    except Exception as error:  # noqa: BLE001 - no part hides another
        yield AcceptanceLine(part, "Command", f"{part} is understood", "fail", repr(error), details=format_exc())


def _parts(text: str) -> tuple[Part, ...]:
    asked = text.split(",")
    if unknown := {*asked} - {*get_args(Part)}:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}: {', '.join(get_args(Part))}")
    return tuple(part for part in get_args(Part) if part in asked)


def _setting(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> Setting:
    device, file = arguments.device, Path(f"{arguments.out}.json")
    facts = _facts(device)
    if device == "cuda" and not facts.get("gpus") and "trouble" not in facts:
        parser.error("torch sees no CUDA device; --device cpu runs everything on the CPU")
    if device == "cuda" and not compiles_launchers():
        print("Lines with compiled blocks will fail: Triton needs gcc and Python.h (python3.X-dev).", file=sys.stderr)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    out = AcceptanceReport(device, date, revision(), facts)
    passed: tuple[str, ...] = ()
    keeps = arguments.go_on or arguments.only != get_args(Part)
    if keeps and file.exists() and (earlier := read_report(file)).device == device:
        again = () if arguments.go_on else arguments.only
        out.lines = [line for line in earlier.lines if line.part not in again]
        out.tables = {part: text for part, text in earlier.tables.items() if part not in again}
        passed = tuple(line.name for line in out.lines if line.status == "pass")
    return Setting(device, out, file, passed)


def compiles_launchers() -> bool:
    """True if Triton finds a C compiler and Python's headers, as `triton/runtime/build.py` looks for them."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").is_file()


def _facts(device: str) -> dict[str, Any]:
    """Ask in another process, so that this one holds no GPU memory and survives torch."""
    asked = [sys.executable, "-c", _FACTS]
    try:
        done = subprocess.run(asked, env=environment_for(device), capture_output=True, text=True, timeout=300)
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        return {"trouble": "torch does not start"}


def tests_of(setting: Setting, part: Part) -> Iterator[AcceptanceLine]:
    """Run the part's groups."""
    deadline = setting.deadline(part)
    for group in (each for each in GROUPS if each.part == part):
        yield from lines_of(
            group,
            device=setting.device,
            environment=setting.environment,
            line_seconds=_LINE_SECONDS[setting.device],
            deadline=deadline,
            without=setting.passed,
        )


def _nccl(setting: Setting) -> Iterator[AcceptanceLine]:
    if setting.device == "cuda" and setting.out.machine.get("gpus", 0) < 2:
        yield AcceptanceLine("nccl", "Two processes", "two GPUs", "not run", "there is one GPU")
    else:
        yield from tests_of(setting, "nccl")


def _bench(setting: Setting) -> Iterator[AcceptanceLine]:
    from shardvit.launch.bench.gpu_report import GpuResults, Machine, report  # imports torch, which may not start

    with tempfile.TemporaryDirectory() as folder:
        file, tiny = Path(folder) / "gpu.json", ["--tiny"] if setting.device == "cpu" else []
        command = [sys.executable, "-m", "shardvit.launch.bench.gpu", "--json", str(file), *tiny]
        why, output = _ended(command, cwd=Path(folder), setting=setting, part="bench")
        if file.exists():
            content = json.loads(file.read_text(encoding="utf-8"))
            results = GpuResults(Machine(**content["machine"]), content["ceilings"], content["outcomes"])
            setting.out.tables["bench"] = "\n".join(report(results))
            yield from bench_lines(results)
    yield _whole("bench", "launch.bench.gpu", why=why, output=output)


def bench_lines(results: GpuResults) -> Iterator[AcceptanceLine]:
    """A line for each contender, and for each of our bounds on a GPU."""
    from shardvit.launch.bench.gpu_report import rows_of, targets, void

    if results.ceilings:
        why = results.ceilings.get("failure", "")
        status: Status = "not run" if why.startswith("not run") else "fail" if why else "pass"
        yield AcceptanceLine("bench", "Contenders", "ceilings", status, why)
    rows = {id(row.outcome): row for row in rows_of(results)}
    bars = {row.size: row for row in reversed(rows.values()) if row.contender == "bar"}
    for number, outcome in enumerate(results.outcomes, start=1):
        name = f"{number}. {outcome['contender']}, {outcome['size']}"
        if (row := rows.get(id(outcome))) is not None:
            why = void(row, bar=bars.get(row.size))
            shown = f"{row.images_per_second:,.1f} images/s"
            yield AcceptanceLine("bench", "Contenders", name, "fail" if why else "pass", why or "", shown)
        else:
            why = outcome["failure"] or "it measured nothing"
            is_absent = why.startswith(("not run", "not installed"))
            yield AcceptanceLine("bench", "Contenders", name, "not run" if is_absent else "fail", why)
    if results.machine.gpu:
        known = gpu_of_driver(results.machine.gpu)
        for each in targets([*rows.values()], peak_flops=known.peak_flops("bf16") if known else None):
            bound = f"{'at least' if each.at_least else 'at most'} {each.bound:.2f}"
            status, why = ("pass", "") if each.met else ("fail", f"{each.value:.2f}, wanted {bound}")
            yield AcceptanceLine("bench", "Our bounds", each.what, status, why, f"{each.value:.2f} ({bound})")


def _demo(setting: Setting) -> Iterator[AcceptanceLine]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardvit.launch.cli", "demo"]
        why, output = _ended(command, cwd=Path(folder), setting=setting, part="demo")
        yield _whole("demo", "shardvit demo", why=why, output=output)
        if not why:
            setting.out.tables["demo"] = output.partition("\nNext:")[0][-1500:]
            runs = Path(folder) / "runs"
            trained, tuned = (_top1(runs / "digits" / stage) for stage in ("pretrain", "finetune"))
            scratch = _top1(runs / "digits-scratch" / "finetune")
            yield _compared("top-1 of pre-training", trained, least=_DEMO_TOP1)
            yield _compared("top-1 of fine-tuning, against from scratch", tuned, least=scratch)


def _top1(stage: Path) -> float:
    results = json.loads((stage / "stage.json").read_text(encoding="utf-8"))["results"]
    return next((results[name] for name in ("val/ema_top1", "val/top1") if name in results), math.nan)


def _compared(what: str, value: float, *, least: float) -> AcceptanceLine:
    status, why = ("pass", "") if value >= least else ("fail", f"{value:.4f}, wanted at least {least:.4f}")
    return AcceptanceLine("demo", "Demo", what, status, why, f"{value:.4f} (at least {least:.4f})")


def _whole(part: Part, what: str, *, why: str, output: str) -> AcceptanceLine:
    status = "fail" if why else "pass"
    return AcceptanceLine(part, "Command", f"{what} ends", status, why, details=output[-12_000:] if why else "")


def _ended(command: list[str], *, cwd: Path, setting: Setting, part: Part) -> tuple[str, str]:
    """Why a command did not end well ("": it did), and its output."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=setting.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        why = ""
        try:
            process.wait(_MOST_SECONDS[setting.device][part])
        except subprocess.TimeoutExpired:
            why = OVER
            stop(process, asks=False)
        output.seek(0)
        said = output.read().decode("utf-8", errors="replace")
    return why or (f"exit code {process.returncode}" if process.returncode else ""), said


_RUN = {"suite": lambda setting: tests_of(setting, "suite"), "bench": _bench, "demo": _demo, "nccl": _nccl}


if __name__ == "__main__":
    main()
