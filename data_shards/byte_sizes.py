"""Sizes as people write them: "500 GB", "1.5TB", "256MiB", "1000"."""

from __future__ import annotations

import re

_MOST_BYTES = 2**63
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_bytes(text: str) -> int:
    """Bytes; units are decimal (kB, MB, GB, TB, PB) or binary (KiB, MiB, ...), in either case.

    Raises:
        ValueError: the text is no size above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0
    if not 0 < size < _MOST_BYTES:
        raise ValueError(f"{text!r} is no size: write it like 500 MB, 1.5TB or 256MiB")
    return int(size)


def show_bytes(num_bytes: float) -> str:
    """`num_bytes` with three digits or so and a decimal unit: "1.21 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} PB"
