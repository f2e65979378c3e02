"""Folders here and in a bucket: a file is there whole or not at all, whatever fails."""

from pathlib import Path

import pytest

from shardvit.data_shards.store import ranges, upload
from shardvit.data_shards.store.download import Downloads
from shardvit.data_shards.store.folders import Folder, open_folder
from tests.data_shards.opened import QUICK


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "SHARED", Downloads(QUICK))
    monkeypatch.setattr(upload, "UPLOADS", Downloads(QUICK))


@pytest.fixture(params=["local", "s3", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "s3":
        request.getfixturevalue("s3")
    where = {"local": tmp_path / "set", "s3": "s3://shards/a b/set", "memory": f"memory://{tmp_path.name}"}
    return open_folder(where[request.param])


def test_what_is_written_is_read(folder: Folder, tmp_path: Path):
    assert folder.size("x/y.json") is None
    with pytest.raises(FileNotFoundError):
        folder.read("x/y.json")
    folder.remove("x/y.json")
    for content in (b"", b"first", b"the second"):
        folder.write("x/y.json", content)
        assert folder.read("x/y.json") == folder.at("x").read("y.json") == content
        assert folder.size("x/y.json") == len(content)
    (tmp_path / "file").write_bytes(b"abc")
    folder.put("x/z.tar", tmp_path / "file")
    assert folder.read("x/z.tar") == b"abc" and not (tmp_path / "file").exists()
    assert ranges.read_range(f"{folder.location}/x/z.tar", 1, 2) == b"bc"
    listed = [(name, size) for name, size, _ in ranges.list_url(folder.location)]
    assert listed == [("x/y.json", 10), ("x/z.tar", 3)]
    folder.remove("x/y.json")
    assert folder.size("x/y.json") is None
    folder.tidy()
