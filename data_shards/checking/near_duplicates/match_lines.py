"""The matches as a file, matches.jsonl: one pair a line, the most alike first.

image {part, key}, other {part, key}, against (the other set), kind, likeness, mirrored
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_shards.checking.near_duplicates.matches import Match, Matches
from data_shards.durable import replace_text

LINES_FILE = "matches.jsonl"


def line(found: Matches, match: Match) -> dict[str, Any]:
    """A match as an entry of `matches.jsonl`."""
    return {
        "image": found.place(match)._asdict(),
        "other": found.other_place(match)._asdict(),
        "against": found.others[match.collection].name,
        "kind": match.kind,
        "likeness": match.likeness,
        "mirrored": match.mirrored,
    }


def write_lines(folder: Path, found: Sequence[Matches]) -> None:
    """Write the file into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(line(one, match), ensure_ascii=False) for one in found for match in one.matches)
    text = "".join(f"{each}\n" for each in lines)
    # Bytes in a key that are not UTF-8 become JSON escapes.
    replace_text(folder / LINES_FILE, text.encode("utf-8", "backslashreplace").decode())
