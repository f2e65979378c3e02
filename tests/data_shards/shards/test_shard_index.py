"""The table of samples is the same before and after the disk, and a broken file is never taken for one."""

import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardvit.data_shards.shards.shard_index import ShardIndex, Texts, load_index, load_note, save_index

texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=12) | st.just("no utf-8: \udcff"), max_size=8)


def make(keys: list[str]) -> ShardIndex:
    numbers = np.arange(len(keys), dtype=np.int64)
    extensions = Texts.of(("jpg", "png")[i % 2] for i in range(len(keys)))
    return ShardIndex(Texts.of(keys), extensions, numbers, numbers + 1, numbers + 2, numbers + 3)


@given(texts)
def test_texts_are_read_like_a_list(content: list[str]):
    found = Texts.of(content)
    assert list(found) == content == [found[i] for i in range(len(content))] and len(found) == len(content)
    assert list(pickle.loads(pickle.dumps(found))) == content
    with pytest.raises(IndexError):
        found[len(content)]


@settings(deadline=None)
@given(texts, st.text(st.characters(codec="utf-8"), max_size=20))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, keys: list[str], note: str):
    path = tmp_path_factory.mktemp("t") / "a.npz"
    index = make(keys)
    save_index(index, path, note=note)
    loaded = load_index(path)
    assert load_note(path) == note and list(path.parent.iterdir()) == [path]
    assert all(list(value) == list(getattr(loaded, name)) for name, value in vars(index).items())
    assert loaded.end == index.end == (2 * (len(keys) - 1) + 5 if keys else 0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_broken_file_is_told(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.mktemp("t") / "a.npz"
    index = make(["a", "b", "cc"])
    save_index(index, path)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with suppress(ValueError):  # nothing else
        loaded = load_index(path)
        # A byte that says nothing, such as a time stamp.
        assert list(loaded.keys) == list(index.keys) and np.array_equal(loaded.image_offset, index.image_offset)


def test_other_files(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        load_index(tmp_path / "nothing.npz")
    np.save(tmp_path / "array.npy", np.arange(3))
    np.savez(tmp_path / "objects.npz", keys=np.array([{}], dtype=object))
    for file in ("array.npy", "objects.npz"):
        with pytest.raises(ValueError, match="not a readable index"):
            load_index(tmp_path / file)
