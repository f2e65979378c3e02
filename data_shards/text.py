"""Format text for people: sizes, durations, tables, and names from files, which `printable` and `one_line` escape."""

import json
import math
import re
import reprlib
from collections.abc import Sequence
from typing import Any, Literal

PAGE_WIDTH = 120
_NARROWEST = 30  # characters that a last column gets, however wide the others are

_MOST_BYTES = 2**63
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def printable(text: str) -> str:
    """Escape control, invisible and undecodable characters, as Python does; line ends stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in "\n\u00a0\u3000" else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def one_line(text: str) -> str:
    """Escape like `printable`, and line ends too: for names."""
    return printable(text).replace("\n", "\\n")


def parse_bytes(text: str) -> int:
    """Parse "500 GB", "1.5TB", "256MiB" or "1000", in either case; ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0
    if not 0 < size < _MOST_BYTES:
        raise ValueError(f"{text!r} is no size: write it like 500 MB, 1.5TB or 256MiB")
    return int(size)


def show_bytes(num_bytes: float) -> str:
    """Format with three digits and a decimal unit: "1.21 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} PB"


def show_duration(seconds: float) -> str:
    """Format as `4.2 s`, `3:07 min`, `2:05 h`, `1 d 2:05 h`; `?` for NaN and infinity."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    days, hours = divmod(minutes // 60, 24)
    return (f"{days:,} d " if days else "") + f"{hours}:{minutes % 60:02d} h"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: "1 image", "2,000 images", "3 classes", "2 micro-batches"."""
    plural = f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def named(names: Sequence[str], *, most: int = 5) -> str:
    """List the first `most` names and count the rest."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(one_line, names[:most])) + more


def table(
    rows: Sequence[Sequence[str]],
    *,
    align: str = "l",
    heading: Literal["none", "ruled"] = "none",
    indent: str = "",
    width: int | None = None,
) -> str:
    """Align rows of equally many cells in columns, two spaces apart, without trailing spaces.

    `align` has "l" or "r" for each column; its last letter covers all further ones. With `heading` "ruled" the first
    row has a rule below it. `width` is the page width in characters; the last column wraps between words to fit.
    """
    from tabulate import tabulate

    if not rows:
        return ""
    columns = len(rows[0])
    limits: list[int | None] = [None] * columns
    if width is not None:
        before = sum(max(len(row[column]) for row in rows) + 2 for column in range(columns - 1))
        limits[-1] = max(_NARROWEST, width - len(indent) - before)
    text = tabulate(
        rows,
        tablefmt="plain",
        colalign=["right" if letter == "r" else "left" for letter in align.ljust(columns, align[-1])],
        disable_numparse=True,
        preserve_whitespace=True,
        maxcolwidths=limits,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = [(indent + line).rstrip() for line in text.split("\n")]
    if heading == "ruled":
        lines.insert(1, indent + "-" * (len(lines[0]) - len(indent)))
    return "\n".join(lines)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; ValueError if it is malformed, nested too deeply, or has a number with thousands of digits."""
    try:
        return json.loads(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = str(error)
    except ValueError:  # int() refuses such numbers: its time grows with the square of their length
        reason = "a number in it has thousands of digits"
    raise ValueError(f"not readable as JSON ({reason})")


def brief(value: Any) -> str:
    """Shorten a value from `parse_json` for messages."""
    return reprlib.repr(value) if isinstance(value, list | dict) else json.dumps(value)[:40]
