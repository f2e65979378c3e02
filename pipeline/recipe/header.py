"""A recipe file's header: the comment that says what it is for, with the published result and what was chosen.

    # One sentence or two.
    #
    #   command   shardvit run NAME train=SHARDS eval=SHARDS
    #   hardware  64 x H200
    #   time      23:26 h, 1,500 GPU-hours

Text for people, which no run depends on. What a family shares stands in the file that its recipes extend, and in it
NAME is the recipe's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KEYS = ("command", "hardware", "time", "result", "source", "chosen")
"""chosen: what is not published, and what stands in its place."""

_ENTRY = re.compile(rf"#   ({'|'.join(KEYS)}) +(\S.*)")
_GPUS = re.compile(r"(\d[\d,]*) x ([A-Za-z0-9]+)")
_GPU_HOURS = re.compile(r"(\d[\d,.]*) GPU-hours")


@dataclass(frozen=True)
class RecipeHeader:
    """What the comment says; `entries`: key -> lines."""

    description: str
    entries: Mapping[str, tuple[str, ...]]

    def entry(self, key: str) -> str:
        """All lines of a key as one; "": there is none."""
        return " ".join(self.entries.get(key, ()))

    @property
    def hardware(self) -> tuple[int, str] | None:
        """GPUs and their kind, as `shardvit plan` takes it; None: it is meant for no GPU."""
        match = _GPUS.match(self.entry("hardware"))
        return (int(match[1].replace(",", "")), match[2].lower()) if match else None

    @property
    def gpu_hours(self) -> float | None:
        match = _GPU_HOURS.search(self.entry("time"))
        return float(match[1].replace(",", "")) if match else None

    @property
    def headline(self) -> str:
        """The result up to its first comma or semicolon that is not within parentheses."""
        return re.split(r"[,;] (?![^(]*\))", self.entry("result"))[0]

    def text(self) -> str:
        """The whole comment again, as in a file."""
        lines = ["# " + line for line in self.description.splitlines()] + ["#"]
        for key in KEYS:
            for number, line in enumerate(self.entries.get(key, ())):
                lines.append(f"#   {key if number == 0 else '':9} {line}")
        return "\n".join(lines) + "\n"


def read_header(files: Sequence[Path], *, name: str) -> RecipeHeader:
    """The header of a recipe made from `files`, the most general first: the last one's description and, of each key,
    the last that one of them has."""
    found = [_parse(path.read_text(encoding="utf-8")) for path in files]
    entries = {key: lines for each in found for key, lines in each.entries.items()}
    named = {key: tuple(re.sub(r"\bNAME\b", name, line) for line in entries[key]) for key in KEYS if key in entries}
    return RecipeHeader(found[-1].description, named)


def _parse(text: str) -> RecipeHeader:
    description: list[str] = []
    entries: dict[str, tuple[str, ...]] = {}
    key = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if match := _ENTRY.fullmatch(line.rstrip()):
            key = match[1]
            entries[key] = (match[2],)
        elif key and line[1:].strip():
            entries[key] += (line[1:].strip(),)
        elif not key and line[1:].strip():
            description.append(line[1:].strip())
    return RecipeHeader("\n".join(description), entries)
