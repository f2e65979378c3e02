"""Folders here and in a bucket: a file is there whole or not at all, whatever fails."""

from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.store import ranges, upload
from shardvit.data_shards.store.download import Downloads, StoreError
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


def test_a_store_that_shows_half_written_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """There a file is written beside its place and moved, over another one, too; a failure leaves nothing behind."""
    import fsspec

    monkeypatch.setattr(upload, "_WHOLE", upload._WHOLE - {"memory"})
    memory = fsspec.filesystem("memory")
    written, moves = list[str](), list[str]()
    cls = type(memory)
    put_file, pipe_file, mv = cls.put_file, cls.pipe_file, cls.mv

    def refuse_to_replace(self: Any, old: str, new: str, **options: Any) -> None:
        moves.append(new)
        if self.exists(new):
            raise FileExistsError(new)
        mv(self, old, new, **options)

    def note_put(self: Any, source: str, path: str, **options: Any) -> None:
        written.append(path)
        put_file(self, source, path, **options)

    def note_pipe(self: Any, path: str, data: bytes, **options: Any) -> None:
        written.append(path)
        pipe_file(self, path, data, **options)
        if data == b"fails":
            raise PermissionError("no more of it")

    monkeypatch.setattr(cls, "mv", refuse_to_replace)
    monkeypatch.setattr(cls, "put_file", note_put)
    monkeypatch.setattr(cls, "pipe_file", note_pipe)
    folder = open_folder(f"memory://{tmp_path.name}/deep/set")
    for content in (b"one", b"the other"):
        folder.write("x/a", content)
        assert folder.read("x/a") == content
    with pytest.raises(StoreError, match="no more of it"):
        folder.write("x/a", b"fails")
    (tmp_path / "file").write_bytes(b"abc")
    folder.put("x/b.tar", tmp_path / "file")
    assert folder.read("x/a") == b"the other" and folder.read("x/b.tar") == b"abc"
    assert len(written) == 4 and all("/x/.a." in path or "/x/.b.tar." in path for path in written)
    assert [name for name, *_ in ranges.list_url(folder.location)] == ["x/a", "x/b.tar"]


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", "a//b", "./a", "a\\b", "a\0b"])
def test_names_may_not_lead_outside(name: str, tmp_path: Path):
    for location in (str(tmp_path / "set"), "s3://shards/set"):
        folder = open_folder(location)
        for use in (folder.read, folder.size, folder.remove, folder.at):
            with pytest.raises(UserError, match="inside"):
                use(name)


@pytest.mark.parametrize(
    "location", ["https://u:SECRET@host/set", "pipe:cat", "hf://datasets/me/x", "git://x/y", "ais://bucket/set"]
)
def test_what_cannot_be_written_to_is_refused_in_one_sentence(location: str):
    with pytest.raises(UserError, match="cannot be written to") as caught:
        open_folder(location)
    assert "SECRET" not in str(caught.value)
