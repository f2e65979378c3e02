"""A set of shards opens from wherever it lies, cheaply, and says what is wrong with it."""

import builtins
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.reading.shard_reader import ShardReader
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.manifest import Manifest, Shard, read_manifest
from shardvit.data_shards.shards.shard_set import ShardSet, ShardsSpec, merge_shard_sets
from shardvit.data_shards.shards.tar_index import build_index, index_path, write_index
from shardvit.data_shards.store.cache import CacheConfig
from shardvit.data_shards.store.store import Store
from tests.data_shards.external_tars import write_tar
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import QUICK
from tests.data_shards.written import write_manifest


def pack_by_hand(root: Path, *, shards: int = 3, labels: LabelSpec | None = None, suffix: str = "") -> Manifest:
    """Tars of two samples each, with their manifest and no index."""
    root.mkdir(parents=True, exist_ok=True)
    entries = []
    for number in range(shards):
        path = root / f"x-{number:06d}.tar"
        parts: list[tuple[str, bytes]] = []
        for row in range(2):
            label = {"cls": b"%d" % row, "json": json.dumps({"label": list(range(row))}).encode()}
            part = labels.part if labels else "cls"
            parts += [(f"k{number}{row}.{part}", label[part]), (f"k{number}{row}.jpg", b"x" * 100)]
        write_tar(path, parts)
        entries.append(Shard(path.name, 2, path.stat().st_size, ""))
    manifest = Manifest(root, f"x{suffix}", "train", ("cat", "dog"), tuple(entries), "./x", labels or LabelSpec())
    write_manifest(manifest)
    return manifest


def keys(shards: ShardSet, **options: Any) -> list[str]:
    reader = ShardReader(shards, **options)
    return [reader.read(i, row=row).key for i, shard in enumerate(shards.shards) for row in range(shard.num_samples)]


def test_a_packed_folder_is_its_manifest(tmp_path: Path):
    manifest = pack_by_hand(tmp_path / "a")
    shards = open_shards(str(tmp_path / "a"))
    assert (shards.name, shards.split, shards.classes, shards.digest) == ("x", "train", ("cat", "dog"), manifest.digest)
    assert shards.num_samples == 6 and shards.num_bytes == manifest.num_bytes and shards.num_classes == 2
    assert shards.label_map == {"cat": 0, "dog": 1} and not shards.is_multi_label and shards.damage == ()
    assert shards.shard_sizes == (2, 2, 2) and shards.source == str(tmp_path / "a")
    assert [shard.url for shard in shards.shards] == [str(path) for path in manifest.shard_paths]
    assert keys(shards) == ["k00", "k01", "k10", "k11", "k20", "k21"]
    assert open_shards(ShardsSpec(f"file://{tmp_path}/a")) == shards


def test_a_relative_folder_stays_what_it_was_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pack_by_hand(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    shards = open_shards("a")
    assert shards.source == "a" and shards.shards[0].name == "a/x-000000.tar"
    monkeypatch.chdir("/")
    assert len(keys(shards)) == 6


def test_no_shard_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pack_by_hand(tmp_path / "a", shards=100)
    before = builtins.open
    opened: list[str] = []
    monkeypatch.setattr(builtins, "open", lambda path, *a, **k: opened.append(str(path)) or before(path, *a, **k))
    assert open_shards(str(tmp_path / "a")).num_samples == 200
    assert not [path for path in opened if path.endswith(".tar")]


def test_labels_in_json_as_lists(tmp_path: Path):
    spec = LabelSpec("json", "label", "multi")
    manifest = pack_by_hand(tmp_path / "a", labels=spec)
    assert read_manifest(tmp_path / "a") == manifest
    shards = open_shards(str(tmp_path / "a"))
    assert shards.is_multi_label and shards.shards[0].labels == spec
    reader = ShardReader(shards)
    assert [reader.read(1, row=row).labels for row in range(2)] == [(), (0,)]


def test_damage_is_refused_or_reported(tmp_path: Path):
    manifest = pack_by_hand(tmp_path / "a", shards=80)  # so many are looked at by threads
    paths = manifest.shard_paths
    paths[7].write_bytes(paths[7].read_bytes()[:2048])
    paths[70].unlink()
    with pytest.raises(UserError, match=r"x-000007\.tar.*2048 bytes.*\(and 1 more shards are damaged\)"):
        open_shards(str(tmp_path / "a"))
    shards = open_shards(str(tmp_path / "a"), damaged="report")
    assert [damage[: damage.index(":")] for damage in shards.damage] == [str(paths[7]), str(paths[70])]
    assert shards.num_samples == 160 and shards.digest == manifest.digest
    assert [number for number, shard in enumerate(shards.shards) if shard.state == "damaged"] == [7, 70]
    assert shards.lost_samples == 3  # two of the absent tar, and the second of the cut one


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    ("kept", "lost"), [(0, 2), (512 + 7, 2), (1024 + 512 + 99, 2), (3584 + 99, 1), (3584 + 100, 0)]
)
def test_the_samples_that_a_cut_has_taken_are_counted(tmp_path: Path, has_index: bool, kept: int, lost: int):
    (path,) = pack_by_hand(tmp_path / "a", shards=1).shard_paths  # blocks: label header, label, image header, image
    if has_index:
        write_index(build_index(path), index_path(path))
    os.truncate(path, kept)
    shards = open_shards(str(tmp_path / "a"), damaged="report")
    assert shards.lost_samples == lost and shards.num_samples == 2
    path.unlink()
    assert open_shards(str(tmp_path / "a"), damaged="report").lost_samples == 2


def test_what_the_manifest_says_is_not_said_again(tmp_path: Path):
    pack_by_hand(tmp_path / "a")
    for wrong in ({"label": "cls"}, {"kind": "multi"}, {"classes": tmp_path / "c"}):
        with pytest.raises(UserError, match=f"manifest.json.*leave out {next(iter(wrong))}"):
            open_shards(ShardsSpec(str(tmp_path / "a"), **wrong))


def test_nothing_there(tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere.*shardvit pack"):
        open_shards(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no manifest\.json in this folder"):
        open_shards(str(tmp_path))
    with pytest.raises(UserError, match=r"x-1\.tar: there is no such tar"):
        open_shards(str(tmp_path / "x-{1..2}.tar"), index_folder=tmp_path / "i", report=str)
    with pytest.raises(UserError, match=r"label.*use cls, txt or json:KEY"):
        open_shards(ShardsSpec(str(tmp_path / "x.tar"), label="json"), index_folder=tmp_path / "i")


# ---- a packed set elsewhere


def upload(server: FaultServer, root: Path) -> None:
    server.files |= {f"/sets/{path.name}": path.read_bytes() for path in root.iterdir()}


def test_a_packed_set_over_http_asks_for_its_manifest_alone(tmp_path: Path, server: FaultServer):
    manifest = pack_by_hand(tmp_path / "a")
    upload(server, tmp_path / "a")
    url = server.url.replace("://", "://user:secret@") + "/sets"
    shards = open_shards(url, store=Store(retry=QUICK))
    assert [path for _, path, _ in server.requests] == ["/sets/manifest.json"] * 2  # its first byte, then all
    here = open_shards(str(tmp_path / "a"))
    assert shards.digest == manifest.digest and replace(shards, source="", shards=here.shards) == replace(
        here, source=""
    )
    assert shards.source == f"{server.url}/sets" and "secret" not in shards.source + shards.shards[0].name
    store = Store(CacheConfig(tmp_path / "cache", limit_bytes=10**8), retry=QUICK)
    assert keys(shards, store=store) == keys(here)
    assert open_shards(server.url + "/sets/").num_samples == 6  # a store of its own will do for a manifest


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "Invalid JSON"), (b"{}", "'version'"), (None, r"x-\{000..127\}\.tar")]
)
def test_a_broken_manifest_elsewhere(server: FaultServer, content: bytes | None, message: str):
    if content is not None:
        server.files["/sets/manifest.json"] = content
    with pytest.raises(UserError, match=rf"http://127.*/sets/manifest\.json.*{message}"):
        open_shards(server.url + "/sets", store=Store(retry=QUICK))


# ---- several sets laid end to end


def test_merged_sets_are_laid_end_to_end(tmp_path: Path):
    pack_by_hand(tmp_path / "a")
    pack_by_hand(tmp_path / "b", shards=1, suffix="2")
    (tmp_path / "b" / "x-000000.tar").unlink()
    first, second = open_shards(str(tmp_path / "a")), open_shards(str(tmp_path / "b"), damaged="report")
    assert merge_shard_sets([first]) is first
    merged = merge_shard_sets([first, second])
    assert (
        list(merged.shards) == [*first.shards, *second.shards]
        and merged.damage == second.damage
        and merged.name == "x + x2"
    )
    assert (first.lost_samples, second.lost_samples, merged.lost_samples) == (0, 2, 2)
    digests = {first.digest, second.digest, merged.digest, merge_shard_sets([second, first]).digest}
    assert len(digests) == 4 and all(len(digest) == 32 for digest in digests)


def test_a_merged_sets_type_is_that_of_all_its_images(tmp_path: Path):
    pack_by_hand(tmp_path / "a")
    eight, sixteen = (
        replace(open_shards(str(tmp_path / "a")), channels=4, dtype=dtype) for dtype in ("uint8", "uint16")
    )
    assert merge_shard_sets([eight, eight]).dtype == "uint8"
    assert merge_shard_sets([eight, sixteen]).dtype == "" and merge_shard_sets([eight, sixteen]).channels == 4
    with pytest.raises(UserError, match=r"has 4 channels and .* has 3 channels"):
        merge_shard_sets([eight, replace(eight, channels=3)])


def test_sets_that_do_not_fit_together(tmp_path: Path):
    pack_by_hand(tmp_path / "a")
    first = open_shards(str(tmp_path / "a"))
    for classes, message in [
        (("cat", "cow"), "class 1 is 'dog' in .*a and 'cow' in b"),
        (("cat", "dog", "cow"), "2 classes in .*a, 3 in b"),
    ]:
        with pytest.raises(UserError, match=f"a and b cannot be mixed.*{message}"):
            merge_shard_sets([first, replace(first, classes=classes, source="b")])
    pack_by_hand(tmp_path / "b", labels=LabelSpec("json", "label", "multi"))
    with pytest.raises(UserError, match="list of labels"):
        merge_shard_sets([first, open_shards(str(tmp_path / "b"))])


def test_needs_no_torch(tmp_path: Path):
    pack_by_hand(tmp_path / "a")
    code = (
        "import sys; from shardvit.data_shards.reading.opening import open_shards; "
        "import shardvit.data_shards.reading.external_shards;"
        "open_shards(sys.argv[1]); open_shards(sys.argv[1] + '/x-000000.tar', report=str);"
        "print({'torch', 'fsspec', 'PIL', 'webdataset'} & set(sys.modules))"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    assert (
        subprocess.check_output([sys.executable, "-c", code, tmp_path / "a"], text=True, env=environment) == "set()\n"
    )
