"""What the two exported programs (ONNX, torch.export) have in common: our record as text.

Costs nothing. The record is the one of `config.json` (`model.saved`), without the key around it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError
from torch import nn

from model.saved import SavedModelMeta


def record_text(meta: SavedModelMeta) -> str:
    """The record as JSON."""
    return meta.model_dump_json(exclude_none=True)


def parse_record(text: str | bytes | None, *, path: Path) -> SavedModelMeta:
    """The record that was found in `path`.

    Raises:
        ValueError: there was none, or it is not valid; the message names `path`.
    """
    if text is None:
        raise ValueError(f"{path} has no record of shardvit, which says what is fed to it: export it with shardvit")
    try:
        return SavedModelMeta.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path}: its record of shardvit is broken ({where}: {first['msg']}): export it again"
        ) from None


def check_request(path: Path, model: nn.Module, *, ending: str) -> None:
    """Refuse what would be exported wrongly.

    Raises:
        ValueError: `path` has another ending, by which nobody would know the format.
    """
    assert not model.training, "a model in training mode would be exported with its dropout"
    if path.suffix != ending:
        raise ValueError(f"{path}: the name of such a file must end in {ending}")
