"""Data sets of a hub as sources, through the real client and a hub on loopback."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.store import ranges
from shardvit.data_shards.store.download import Downloads, RetryPolicy
from tests import hub as hubs
from tests.data_shards.packing.sources.places import CLASSES, EXPECTED, images_of, open_at
from tests.data_shards.packing.sources.tables.test_tables import NAMES, hub_table, pushed, write_parquet


def find(hub: hubs.Hub, home: Path, monkeypatch: pytest.MonkeyPatch, *, token: str = "") -> None:
    """As a new process would: a file system keeps what it saw of a hub."""
    hubs.find_hub(hub, home, monkeypatch, token=token)
    monkeypatch.setattr(ranges, "SHARED", Downloads(RetryPolicy()))


def test_a_data_set_of_a_hub_is_read_without_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hubs.serving() as hub:
        find(hub, tmp_path / "home", monkeypatch)
        made = hub.add_folder("someone/pets", pushed(tmp_path / "here"), kind="datasets")
        mark = tmp_path / "mark"
        made.commit(
            dict.fromkeys(("script.py", "pets.py", "conftest.py"), f"import os; os.mkdir({str(mark)!r})".encode())
        )
        source = open_at("hf://datasets/someone/pets", tmp_path / "work")
        assert images_of(source) == EXPECTED and source.classes == CLASSES
        asked = [path for _, path, _ in hub.requests]
        assert not mark.exists() and not [path for path in asked if path.endswith((".py", ".md"))]


def test_a_revision_a_folder_and_a_private_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(hub_table(NAMES[:5]), tmp_path / "here/small/train-0.parquet")
    write_parquet(hub_table(NAMES[:9]), tmp_path / "here/big/train-0.parquet")
    with hubs.serving() as hub:
        made = hub.add_folder("someone/pets", tmp_path / "here", kind="datasets")
        first = made.at("main")
        made.access = "private"
        made.commit({"small/train-0.parquet": (tmp_path / "here/big/train-0.parquet").read_bytes()})
        find(hub, tmp_path / "home", monkeypatch)
        with pytest.raises(UserError) as caught:
            open_at("hf://datasets/someone/pets/small", tmp_path / "work")
        assert "someone/pets" in str(caught.value) and "\n" not in str(caught.value)
        find(hub, tmp_path / "home", monkeypatch, token=hubs.TOKEN)
        assert open_at("hf://datasets/someone/pets/small", tmp_path / "work").num_images == 9
        assert open_at(f"hf://datasets/someone/pets@{first}/small", tmp_path / "work").num_images == 5
        with pytest.raises(UserError, match="big, small"):
            open_at("hf://datasets/someone/pets", tmp_path / "work")
