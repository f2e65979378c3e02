"""What a check says: a name, a verdict, what was found, what to do. Values, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "note", "problem", "absent"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        verdict: fine; note: it works, something could be better or is worth knowing; problem: training will fail or
            is sure to suffer; absent: it is not here, which a machine may well do without.
        found: the facts, in a line.
        remedy: what to do, one sentence; never empty for a note or a problem.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.found and (self.remedy or self.verdict in ("fine", "absent")), self


@dataclass(frozen=True)
class Section:
    """The findings about one subject, such as "machine"."""

    subject: str
    checks: tuple[Check, ...]


def exit_code(sections: tuple[Section, ...]) -> int:
    """0 when nothing is a problem, else 1."""
    return int(any(check.verdict == "problem" for section in sections for check in section.checks))
