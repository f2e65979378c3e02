"""Published sets opened, and what is refused."""

from pathlib import Path
from typing import Any, Literal

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.archive import Unpacking
from shardvit.data_shards.packing.sources.base import Source
from shardvit.data_shards.packing.sources.recognise import Published, open_source


def touch(root: Path, *files: str) -> Path:
    """Write files whose content is their name."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(file.encode())
    return root


def opened(path: Path, *, unfit: Literal["refuse", "skip"] = "refuse", **options: Any) -> Source:
    """`options` are those of `Published`; archives are decompressed beside."""
    unpacking = Unpacking(path.parent / "unpacked", report=lambda line: None)
    return open_source(str(path), published=Published(**options), unpacking=unpacking, unfit=unfit)


def refused(path: Path, message: str, **options: Any) -> None:
    """It is, by one sentence that names the path."""
    with pytest.raises(UserError, match=message) as caught:
        opened(path, **options)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
