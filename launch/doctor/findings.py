"""Format the doctor's checks as text and as JSON.

The JSON keys are stable; new ones may be added (`version` changes if one is removed or changes its meaning):

    version          1
    ok               true without problems, as exit code 0
    problems, notes  number of checks with that verdict
    seconds          time taken
    left_out         checks that --quick left out
    checks           list of {subject, name, verdict, found, remedy}; verdict: "fine", "note", "problem", "absent";
                     remedy: what to do, or empty
    reports          output of torch's collect_env and DeepSpeed's ds_report; empty with --quick
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import indent
from typing import Any, Literal

from shardvit.data_shards.text import show_duration, table

Verdict = Literal["fine", "note", "problem", "absent"]

_VERSION = 1
_WIDTH = 116


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    verdict: Verdict  # note: works, worth knowing; problem: training fails or suffers; absent: may be fine
    found: str  # the facts, in one line
    remedy: str = ""  # one sentence; never empty for a note or a problem

    def __post_init__(self) -> None:
        assert self.found and (self.remedy or self.verdict in ("fine", "absent")), self


def judge(name: str, found: str, *cases: tuple[bool, Verdict, str]) -> Check:
    """Make a check with the verdict and remedy of the first case that holds; "fine" if none does."""
    for holds, verdict, remedy in cases:
        if holds:
            return Check(name, verdict, found, remedy)
    return Check(name, "fine", found)


@dataclass(frozen=True)
class Diagnosis:
    """All checks, by subject such as "machine"."""

    checks: Mapping[str, Sequence[Check]]
    left_out: tuple[str, ...]
    seconds: float
    reports: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return int(self._count("problem") > 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "ok": self.exit_code == 0,
            "problems": self._count("problem"),
            "notes": self._count("note"),
            "seconds": round(self.seconds, 3),
            "left_out": list(self.left_out),
            "checks": [
                {"subject": subject, **asdict(each)} for subject, checks in self.checks.items() for each in checks
            ],
            "reports": dict(self.reports),
        }

    def as_text(self) -> str:
        lines = [f"{name}\n{indent(text.strip(), '  ')}\n" for name, text in self.reports.items()]
        for subject, checks in self.checks.items():
            rows = [row for each in checks for row in _rows(each)]
            lines += [subject, table(rows, indent="  ", width=_WIDTH), ""]
        counts = [(self._count("problem"), "problem"), (self._count("note"), "note")]
        parts = [f"{count} {name}{'s' * (count != 1)}" for count, name in counts if count]
        left_out = f"; --quick left out {', '.join(self.left_out)}" if self.left_out else ""
        lines.append(f"doctor: {', '.join(parts) or 'all is well'} ({show_duration(self.seconds)}){left_out}")
        return "\n".join(lines)

    def _count(self, verdict: Verdict) -> int:
        return sum(each.verdict == verdict for checks in self.checks.values() for each in checks)


def _rows(check: Check) -> list[tuple[str, str, str]]:
    word = "PROBLEM" if check.verdict == "problem" else check.verdict
    found = (f"{word:<7}", check.name, check.found)
    return [found, ("", "", f"-> {check.remedy}")] if check.remedy else [found]
