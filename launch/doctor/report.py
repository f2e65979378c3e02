"""The doctor's findings as text for people, and as JSON for programs.

The keys of the JSON are stable; new ones may be added (`version` changes if any is removed or changes its meaning):

    version          1
    ok               true without problems, as the exit code 0
    problems, notes  how many checks of each verdict
    seconds          that it took
    left_out         checks that --quick left out
    checks           a list of {subject, name, verdict, found, remedy}; verdict: "fine", "note", "problem", "absent";
                     remedy: what to do, or an empty text
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from data_shards.text import show_duration
from launch.doctor.result import Check, Section, Verdict, exit_code

_VERSION = 1
_WIDTH = 116
_WORDS: dict[Verdict, str] = {"fine": "fine", "note": "note", "problem": "PROBLEM", "absent": "absent"}


@dataclass(frozen=True)
class Report:
    """All findings."""

    sections: tuple[Section, ...]
    left_out: tuple[str, ...]
    seconds: float

    @property
    def exit_code(self) -> int:
        return exit_code(self.sections)

    def count(self, verdict: Verdict) -> int:
        """How many checks came to this verdict."""
        return sum(check.verdict == verdict for section in self.sections for check in section.checks)


def as_json(report: Report) -> dict[str, Any]:
    """The report as described above."""
    return {
        "version": _VERSION,
        "ok": report.exit_code == 0,
        "problems": report.count("problem"),
        "notes": report.count("note"),
        "seconds": round(report.seconds, 3),
        "left_out": list(report.left_out),
        "checks": [
            {"subject": section.subject, **asdict(check)} for section in report.sections for check in section.checks
        ],
    }


def as_text(report: Report) -> str:
    """The report for people; its last line is the verdict."""
    checks = [check for section in report.sections for check in section.checks]
    width = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    for section in report.sections:
        lines.append(section.subject)
        for check in section.checks:
            lines += _lines(check, width=width)
        lines.append("")
    return "\n".join([*lines, verdict(report)])


def verdict(report: Report) -> str:
    """One line: "doctor: 2 problems, 1 note (21 s)"."""
    counts = [(report.count("problem"), "problem"), (report.count("note"), "note")]
    parts = [f"{count} {name}{'s' * (count != 1)}" for count, name in counts if count]
    left_out = f"; --quick left out {', '.join(report.left_out)}" if report.left_out else ""
    return f"doctor: {', '.join(parts) or 'all is well'} ({show_duration(report.seconds)}){left_out}"


def _lines(check: Check, *, width: int) -> list[str]:
    margin = " " * (2 + 7 + 2 + width + 2)
    first = f"  {_WORDS[check.verdict]:<7}  {check.name:<{width}}  "
    lines = textwrap.wrap(check.found, _WIDTH, initial_indent=first, subsequent_indent=margin, break_on_hyphens=False)
    if check.remedy:
        lines += textwrap.wrap(
            check.remedy,
            _WIDTH,
            initial_indent=f"{margin}-> ",
            subsequent_indent=f"{margin}   ",
            break_on_hyphens=False,
        )
    return lines
