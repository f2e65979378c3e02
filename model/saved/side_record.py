"""Our record in others' files: beside them (FILE.json, like `config.json`) or inside (ONNX, torch.export)."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from model.saved.model_folder import SavedModelMeta, first_mistake, read_record, record_json, write_json


def side_path(file: Path) -> Path:
    """Path of the record of `file`."""
    return file.with_name(f"{file.name}.json")


def write_side_record(file: Path, *, meta: SavedModelMeta) -> None:
    """Write the record of `file` beside it."""
    write_json(side_path(file), record_json(meta))


def read_side_record(file: Path) -> SavedModelMeta | None:
    """The record beside `file`; None: there is none. Raises a ValueError that names it if it is broken."""
    path = side_path(file)
    try:
        return read_record(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is no record of shardvit ({error}): remove it, or bring the right one back") from None


def parse_inside(text: str | bytes | None, *, path: Path) -> SavedModelMeta:
    """The record found inside the program `path`; raises a ValueError that names `path` if it is missing or invalid."""
    if text is None:
        raise ValueError(f"{path} has no record of shardvit, which says what is fed to it: export it with shardvit")
    try:
        return SavedModelMeta.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(
            f"{path}: its record of shardvit is broken ({first_mistake(error)}): export it again"
        ) from None
