"""The report of `launch.bench.acceptance`: lines that pass, fail or are not run, the machine, JSON and a page.

The JSON is written after each line, so that whatever ends the driver costs the line that was running.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from shardvit.data_shards.durable import replace_text
from shardvit.launch.pages.blocks import PageBlock, PageCell, PageSection, PageTable, PageText
from shardvit.launch.pages.page import render_page

Part = Literal["suite", "bench", "demo", "nccl"]
Status = Literal["pass", "fail", "not run"]
TITLES: dict[Part, str] = {
    "suite": "Acceptance suite",
    "bench": "Training speed",
    "demo": "The demo",
    "nccl": "Two processes",
}
_LIBRARIES = ("torch", "torchvision", "triton", "deepspeed", "accelerate", "timm", "transformers", "numpy", "pytest")
_MOST_DETAILS = 30  # failures shown in full on the page


@dataclass(frozen=True)
class AcceptanceLine:
    """What became of one line."""

    part: Part
    group: str
    name: str  # a pytest id within the suite
    status: Status
    reason: str = ""  # why it failed or was not run
    shown: str = ""  # what it measured
    seconds: float = 0.0
    details: str = ""  # of a failure: the end of the output

    @property
    def words(self) -> str:
        """The name without its file."""
        test, _, case = self.name.rpartition("::")[2].removeprefix("test_").partition("[")
        return test.replace("_", " ") + (f": {case.removesuffix(']')}" if case else "")


@dataclass
class AcceptanceReport:
    """All that is in the JSON."""

    device: Literal["cuda", "cpu"]
    date: str
    commit: str
    machine: dict[str, Any]
    lines: list[AcceptanceLine] = field(default_factory=list)
    tables: dict[Part, str] = field(default_factory=dict)  # what a part printed

    @property
    def counts(self) -> Counter[str]:
        return Counter(line.status for line in self.lines)

    def put(self, line: AcceptanceLine) -> None:
        """Add the line, in the place of an earlier result."""
        key = line.part, line.group, line.name
        places = [at for at, each in enumerate(self.lines) if (each.part, each.group, each.name) == key]
        if places:
            self.lines[places[0]] = line
        else:
            self.lines.append(line)

    def write(self, file: Path) -> None:
        replace_text(file, json.dumps(asdict(self), indent=1) + "\n", sync="none")

    def write_page(self, file: Path) -> None:
        """Write the page that needs no other file."""
        replace_text(file, _page(self), sync="none")


def read_report(file: Path) -> AcceptanceReport:
    """Read `AcceptanceReport.write`'s file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return AcceptanceReport(**{**content, "lines": [AcceptanceLine(**each) for each in content["lines"]]})


def machine_facts() -> dict[str, Any]:
    """Describe this machine; imports torch and asks the driver, so call it in a process of its own."""
    import torch

    facts: dict[str, Any] = {"machine": platform.platform(), "Python": platform.python_version()}
    facts |= {f"torch's {name}": str(value) for name, value in (("CUDA", torch.version.cuda),) if value}
    facts["gpus"] = 0
    if torch.cuda.is_available():
        cuda: Any = torch.cuda
        facts |= {
            "gpus": torch.cuda.device_count(),
            "GPU": torch.cuda.get_device_name(0),
            "compute capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
            "GPU memory, GB": round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1),
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        }
    if found := shutil.which("nvidia-smi"):
        asked = [found, "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(subprocess.SubprocessError, OSError):
            facts["driver"] = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split("\n")[0]
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            facts[library] = version(library)
    return facts


def _page(report: AcceptanceReport) -> str:
    counts, machine = report.counts, report.machine
    failed = [line for line in report.lines if line.status == "fail"]
    facts = [(str(counts[status]), label) for status, label in (("pass", "pass"), ("fail", "fail"))]
    facts.append((str(counts["not run"]), "not run, with the reason"))
    sections = [PageSection("What failed", list(_failures(failed)))]
    for part, title in TITLES.items():
        lines = [line for line in report.lines if line.part == part]
        groups = dict.fromkeys(line.group for line in lines)
        blocks: list[PageBlock] = [_table(group, [line for line in lines if line.group == group]) for group in groups]
        blocks += [PageText(report.tables[part], "code")] if part in report.tables else []
        passed = sum(line.status == "pass" for line in lines)
        sections.append(PageSection(title, blocks, brief=f"{passed} of {len(lines)} pass"))
    rows: list[list[PageCell]] = [[name, str(value)] for name, value in machine.items()]
    sections.append(PageSection("Machine", [PageTable(("what", "which"), rows)]))
    on = machine.get("GPU", "the CPU") if report.device == "cuda" else "the CPU: nothing here is of a GPU"
    lead = f"On {on}; {report.date}, commit {report.commit}."
    return render_page("GPU acceptance", sections=sections, lead=lead, facts=facts).html


def _failures(failed: Sequence[AcceptanceLine]) -> Iterator[PageBlock]:
    for line in failed[:_MOST_DETAILS]:
        yield PageText(line.reason, "prose", title=f"{line.group}: {line.words}")
        if line.details:
            yield PageText(line.details, "code")
    if len(failed) > _MOST_DETAILS:
        yield PageText(f"{len(failed) - _MOST_DETAILS} more are in the tables and the JSON.", "note")


def _table(group: str, lines: Sequence[AcceptanceLine]) -> PageTable:
    rows: list[list[PageCell]] = [
        [line.words, line.status, round(line.seconds, 1), line.shown, line.reason] for line in lines
    ]
    return PageTable(("line", "result", "seconds", "measured", "reason"), rows, title=group)
