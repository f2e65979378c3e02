"""Other tools' tars: the samples are those that webdataset reads, damage is told, and the second open is free."""

import json
import multiprocessing
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading import indexing as foreign
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import RawSample
from shardvit.data_shards.shards import tar_walk
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import Store
from tests.data_shards.external_tars import IMAGES, Samples, by_shard_writer, numbered, opened, read_all, write_tar
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
    # What is done and said when it takes long has tests of its own; a slow disk does not make it so for the others.
    monkeypatch.setattr(foreign, "_WORTH_PROCESSES_SECONDS", 1e9)
    monkeypatch.setattr(foreign, "_PROGRESS_SECONDS", 1e9)


def by_webdataset(folder: Path) -> Samples:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    found = []
    for path in sorted(folder.glob("*.tar")):
        with open(path, "rb") as stream:
            found += group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}]))
    return found


def test_what_webdatasets_writer_wrote_is_what_webdataset_reads(tmp_path: Path):
    """Its tars are in the pax format with a header for each time stamp; keys have spaces here, images many endings."""
    folder = by_shard_writer(tmp_path / "set", numbered())
    shards = opened(folder)
    assert (shards.name, shards.source, shards.classes) == ("set", str(folder), ("0", "1", "2"))
    assert shards.shard_sizes == (5, 5, 2) and shards.damage == ()
    assert shards.num_bytes == sum(path.stat().st_size for path in folder.glob("*.tar"))
    expected = [
        RawSample(sample["__key__"], next(sample[e] for e in IMAGES if e in sample), (int(sample["cls"]),))
        for sample in by_webdataset(folder)
    ]
    assert read_all(shards) == expected and len(expected) == 12
    names = opened(ShardsSpec(str(folder), label="json:label"))
    assert names.classes == ("name0", "name1")
    assert [sample.labels for sample in read_all(names)] == [(i % 2,) for i in range(12)]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_layout_of_img2dataset(tmp_path: Path, format: int):
    """KEY.jpg, KEY.json, KEY.txt, captions in txt, and its other files beside the tars."""
    parts = []
    for i in range(6):
        meta = {"caption": f"photo {i}", "label": i % 2, "sha256": "ab" * 32, "exif": "{}", "tags": ["t", f"t{i}"]}
        key = f"{i:09d}"
        parts += [(f"{key}.jpg", bytes([i]) * 99), (f"{key}.json", json.dumps(meta).encode()), (f"{key}.txt", b"photo")]
    write_tar(tmp_path / "00000.tar", parts, format=format)
    (tmp_path / "00000.parquet").write_bytes(b"x")
    (tmp_path / "00000_stats.json").write_text("{}")
    with pytest.raises(UserError, match=r"no .cls member.*image, json, txt: give label: txt or .*json:label") as caught:
        opened(tmp_path)
    assert "json:tags" in str(caught.value) and "\n" not in str(caught.value)
    shards = opened(ShardsSpec(str(tmp_path), label="json:label"))
    assert [sample.labels[0] for sample in read_all(shards)] == [0, 1] * 3
    tags = opened(ShardsSpec(str(tmp_path / "{00000..00000}.tar"), label="json:tags", kind="multi"))
    assert tags.is_multi_label and tags.classes == ("t", "t0", "t1", "t2", "t3", "t4", "t5")
    assert read_all(tags)[3].labels == (0, 4)


def test_samples_without_image_or_label_are_named(tmp_path: Path):
    parts = [("a.jpg", b"1"), ("a.cls", b"0"), ("b.cls", b"0"), ("c.jpg", b"x"), ("d.jpg", b"2"), ("d.cls", b"-1")]
    parts += [("e.jpg", b"x"), ("e.cls", b""), ("f.jpg", b"3"), ("f.cls", b"1"), ("README", b"")]
    path = write_tar(tmp_path / "a.tar", parts)
    with pytest.raises(UserError, match=r"a\.tar: 4 samples are left out \('b' has 0 images.*'c'.*'d'"):
        opened(path)
    shards = opened(path, damaged="report")
    assert [sample.key for sample in read_all(shards)] == ["a", "f"]
    assert shards.damage == opened(path, damaged="report").damage and len(shards.damage) == 1
    assert shards.lost_samples == 4


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def garbled(data: bytes) -> bytes:
    middle = len(data) // 2 // 512 * 512
    return data[:middle] + b"\xee" * 2048 + data[middle + 2048 :]


def compressed(data: bytes) -> bytes:
    import gzip

    return gzip.compress(data)


def no_tar(data: bytes) -> bytes:
    return b"<html>not found</html>" * 100


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, r"cut short"),
        (garbled, r"no readable header at byte \d+"),
        (compressed, "uncompressed tar: there is no tar header at byte 0"),
        (no_tar, "no tar header at byte 0"),
        (None, "there is no such tar"),
    ],
)
def test_a_broken_tar_is_named_with_its_byte(tmp_path: Path, spoil: Callable[[bytes], bytes] | None, message: str):
    samples = [{"__key__": f"k{i}", "jpg": b"x" * 1000, "cls": 1} for i in range(30)]
    folder = by_shard_writer(tmp_path / "set", samples, per_shard=10)
    path = folder / "x-000001.tar"
    spec = ShardsSpec(str(folder / "x-{000000..000002}.tar"))
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes()))
    for _ in range(2):  # from the tars, and from the index
        with pytest.raises(UserError, match=rf"x-000001\.tar: .*{message}") as caught:
            opened(spec)
        assert "\n" not in str(caught.value)
        shards = opened(spec, damaged="report")
        (damage,) = shards.damage
        assert "x-000001.tar" in damage
        left = 10 if spoil in (cut, garbled) else 0
        keys = [sample.key for sample in read_all(shards)]
        assert keys[:10] == [f"k{i}" for i in range(10)] and keys[-10:] == [f"k{i}" for i in range(20, 30)]
        assert keys[10:-10] == [f"k{i}" for i in range(10, 10 + len(keys) - 20)]
        assert 0 < len(keys) - 20 < 10 if left else len(keys) == 20
        assert shards.lost_samples == 30 - len(keys)  # as many were in it as in the others
        assert all(shard.num_samples for shard in shards.shards)
    if spoil is not None:  # the whole copy is noticed
        by_shard_writer(folder, samples, per_shard=10)
        assert opened(spec).num_samples == 30


def test_no_sample_at_all(tmp_path: Path):
    write_tar(tmp_path / "a.tar", [])
    with pytest.raises(UserError, match="no samples"):
        opened(tmp_path)
    with pytest.raises(UserError, match=r"b\.tar: there is no such tar"):
        opened(str(tmp_path / "b.tar"), damaged="report")


# ---- the kept indexes


def test_the_second_open_reads_no_tar_and_a_changed_tar_alone_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = by_shard_writer(tmp_path / "set", numbered())
    read: list[str] = []
    original = foreign.index_tar
    monkeypatch.setattr(foreign, "index_tar", lambda path, **kw: read.append(path) or original(path, **kw))
    walked: list[int] = []
    walk = tar_walk.walk_tar
    monkeypatch.setattr("shardvit.data_shards.shards.tar_index.walk_tar", lambda fd: walked.append(fd) or walk(fd))
    lines: list[str] = []
    first = opened(folder, report=lines.append)
    assert len(read) == len(walked) == 3 and "indexing 3 tars" in lines[0] and "12 samples" in lines[-1]
    assert opened(folder, report=lines.append) == first
    assert len(read) == 3 and len(lines) == 2
    sample = {"__key__": "new", "jpg": b"y", "cls": 4}
    import webdataset

    with webdataset.TarWriter(str(folder / "x-000001.tar")) as writer:
        writer.write(sample)
    second = opened(folder)
    assert second.shard_sizes == (5, 1, 2) and second.classes == ("0", "1", "2", "3", "4")
    assert len(walked) == 4 and second.digest != first.digest
    assert not list(folder.glob("*.idx")) and not list(folder.glob("*.npz"))  # nothing beside the tars


def test_damaged_or_interrupted_indexes_are_made_again(tmp_path: Path):
    folder = by_shard_writer(tmp_path / "set", numbered())
    kept = tmp_path / "kept"
    first = opened(folder, index_folder=kept)
    (place,) = kept.iterdir()
    assert all(shard.index is not None and shard.index.parent == place for shard in first.shards)
    one = (place / "set.json").read_text()
    wrong = one.replace('"num_samples":5', '"num_samples":"5"').replace('"num_samples": 5', '"num_samples": "5"')
    assert wrong != one
    for content in ("", "{", "[]", '{"tars": 3}', "\x00", "[" * 3000, wrong):
        (place / "set.json").write_text(content)
        assert opened(folder, index_folder=kept) == first
    (place / "set.json").unlink()  # killed before the end, in the middle of a file
    files = sorted(place.glob("*.npz"))
    files[0].write_bytes(files[0].read_bytes()[:100])
    files[1].unlink()
    assert opened(folder, index_folder=kept) == first
    assert read_all(first) == read_all(opened(folder, index_folder=kept))


def test_the_digest_is_of_the_content_not_of_the_place(tmp_path: Path):
    samples = numbered()
    first = opened(by_shard_writer(tmp_path / "a", samples))
    second = opened(by_shard_writer(tmp_path / "b", samples))
    assert first.digest == second.digest and len(first.digest) == 32 and first != second
    others = [
        opened(ShardsSpec(str(tmp_path / "a"), label="json:label")),
        opened(by_shard_writer(tmp_path / "c", [{**samples[0], "cls": 1}, *samples[1:]])),
        opened(by_shard_writer(tmp_path / "d", [{**samples[0], "__key__": "other"}, *samples[1:]])),
        opened(by_shard_writer(tmp_path / "e", [{**samples[0], "jpg": b"longer image"}, *samples[1:]])),
        opened(by_shard_writer(tmp_path / "f", samples[::-1])),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 6


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    folder = by_shard_writer(tmp_path / "set", numbered(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set XDG_CACHE_HOME to a folder"):
        opened(folder, index_folder=tmp_path / "file")


def test_many_tars_are_indexed_by_several_processes_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = by_shard_writer(tmp_path / "set", numbered(40), per_shard=4)
    alone = opened(folder, index_folder=tmp_path / "alone")
    monkeypatch.setattr(foreign, "_WORTH_PROCESSES_SECONDS", 0.0)
    monkeypatch.setattr(foreign, "_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(foreign, "num_cores", lambda: 2)
    seen: list[int] = []
    original = foreign.run_parts
    monkeypatch.setattr(foreign, "run_parts", lambda *args, **kw: seen.append(kw["processes"]) or original(*args, **kw))
    lines: list[str] = []
    together = opened(folder, index_folder=tmp_path / "together", report=lines.append)
    assert seen == [2]
    assert (together.digest, together.shard_sizes) == (alone.digest, alone.shard_sizes)
    assert read_all(together) == read_all(alone)
    assert any("of 10 tars" in line and "left" in line for line in lines)


def _open_in_process(folder: Path, kept: Path, queue: Any) -> None:
    lines: list[str] = []
    original = foreign.index_tar

    def slow(path: str, **options: Any) -> Any:
        time.sleep(0.2)
        return original(path, **options)

    foreign.index_tar = slow  # type: ignore[assignment]
    shards = open_shards(str(folder), index_folder=kept, report=lines.append)
    queue.put((shards.digest, [line for line in lines if "indexing" in line]))


def test_of_processes_that_open_at_once_one_indexes(tmp_path: Path):
    folder = by_shard_writer(tmp_path / "set", numbered())
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_open_in_process, args=(folder, tmp_path / "kept", queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=240) for _ in processes]
    for process in processes:
        process.join()
    assert len({digest for digest, _ in results}) == 1
    indexing = [line for _, lines in results for line in lines if "once" in line]
    assert len(indexing) == 1


# ---- from elsewhere


def test_tars_over_http_are_indexed_from_the_stores_cache(tmp_path: Path, server: FaultServer):
    folder = by_shard_writer(tmp_path / "set", numbered(20), per_shard=2)
    for path in folder.glob("*.tar"):
        server.files[f"/data/{path.name}"] = path.read_bytes()
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=100_000_000), retry=QUICK)
    spec = ShardsSpec(server.url.replace("://", "://user:secret@") + "/data/x-{000000..000009}.tar")
    shards = opened(spec, store=store)
    here = opened(folder)
    assert shards.digest == here.digest and shards.classes == here.classes
    assert read_all(shards, store=store) == read_all(here)
    assert max(server.totals().values()) == 1  # what was indexed lies in the cache
    assert "secret" not in repr((shards.name, shards.source, [shard.name for shard in shards.shards]))
    assert opened(spec, store=Store(store.cache, retry=QUICK)) == shards
    assert max(server.totals().values()) == 1
    kept = Path(os.environ["XDG_CACHE_HOME"])
    assert not any(b"secret" in path.read_bytes() for path in kept.rglob("*") if path.is_file())


def test_a_broken_or_absent_tar_over_http(tmp_path: Path, server: FaultServer):
    folder = by_shard_writer(tmp_path / "set", numbered(8), per_shard=4)
    first, second = (path.read_bytes() for path in sorted(folder.glob("*.tar")))
    server.files = {"/x-0.tar": first, "/x-1.tar": second[: len(second) // 2]}
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=100_000_000), retry=QUICK)
    spec = ShardsSpec(server.url + "/x-{0..2}.tar")
    with pytest.raises(UserError, match=r"http://.*/x-1\.tar: the tar is cut short.*\(and 1 more tars are damaged\)"):
        opened(spec, store=store)
    shards = opened(spec, store=store, damaged="report")
    assert len(shards.damage) == 2 and "x-2.tar: there is no such tar" in shards.damage[1]
    found = read_all(shards, store=store)
    assert 4 < len(found) < 8 and found == read_all(opened(folder))[: len(found)]


def test_the_output_of_a_command(tmp_path: Path):
    folder = by_shard_writer(tmp_path / "set", numbered(8), per_shard=4)
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=300_000_000), retry=QUICK, commands="run")
    shards = opened(f"pipe:cat {folder}/x-{{000000..000001}}.tar", store=store)
    assert read_all(shards, store=store) == read_all(opened(folder))
    assert shards.num_bytes is None
