"""The record beside a file whose format has no place for it: FILE.json holds what `config.json` holds of a folder.

Written with npz and torchvision exports, and believed by their readers in place of guesses. Costs a small file.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from model.saved import RECORD_KEY, SavedModelMeta


def side_path(file: Path) -> Path:
    """Where the record of `file` is."""
    return file.with_name(f"{file.name}.json")


def write_side_record(file: Path, *, meta: SavedModelMeta) -> None:
    """Write the record of `file` beside it."""
    record = {RECORD_KEY: meta.model_dump(mode="json", exclude_none=True)}
    side_path(file).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_side_record(file: Path) -> SavedModelMeta | None:
    """The record beside `file`; None where there is none.

    Raises:
        ValueError: there is one, but it is broken; the message names it.
    """
    path = side_path(file)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return SavedModelMeta.model_validate(content[RECORD_KEY])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"{path} is no record of shardvit ({error}): remove it, or bring the right one back") from None
