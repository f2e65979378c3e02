"""JSON that somebody else wrote: whatever is wrong with it is one kind of error, in a few words."""

from __future__ import annotations

import json
import reprlib
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`.

    Raises:
        ValueError: it is no JSON, no text, nested too deeply, or has numbers of thousands of digits; says which.
    """
    try:
        return json.loads(text)
    except RecursionError:
        reason = "it is nested too deeply"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = str(error)
    except ValueError:  # int() refuses such numbers, because it takes time that grows with their square
        reason = "a number in it has thousands of digits"
    raise ValueError(f"not readable as JSON ({reason})")


def brief(value: Any) -> str:
    """The beginning of what `parse_json` gave, for messages, however long or deep it is."""
    return reprlib.repr(value) if isinstance(value, list | dict) else json.dumps(value)[:40]
