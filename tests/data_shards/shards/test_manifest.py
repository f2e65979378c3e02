"""The manifest survives a round trip, refuses what contradicts the folder, and is written whole or not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.labels import LabelSpec
from shardvit.data_shards.shards.manifest import Manifest, Shard, read_manifest, timm_info
from tests.data_shards.written import write_manifest


def make(root: Path, *, sizes: tuple[int, ...] = (512, 1024)) -> Manifest:
    root.mkdir(parents=True, exist_ok=True)
    shards = []
    for i, size in enumerate(sizes):
        file = f"x-{i:06d}.tar"
        (root / file).write_bytes(bytes(size))
        shards.append(Shard(file, i + 1, size, f"{i:064x}"))
    return Manifest(root, "x", "train", ("Katze", "Hündchen"), tuple(shards), "./x")


def edit(root: Path, **changes: object) -> None:
    path = root / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_round_trip(tmp_path: Path):
    manifest = make(tmp_path)
    write_manifest(manifest)
    assert read_manifest(tmp_path) == manifest
    assert read_manifest(str(tmp_path)).num_samples == 3
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["label_map"] == {"Katze": 0, "Hündchen": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "sizes.json", "x-000000.tar", "x-000001.tar"}


def test_sizes_json_as_open_clip_reads_it(tmp_path: Path):
    manifest = make(tmp_path)
    write_manifest(manifest)
    sizes = json.loads((tmp_path / "sizes.json").read_text())
    assert sum(sizes[path.name] for path in tmp_path.glob("*.tar")) == 3


def test_digest_changes_with_content_order_and_classes_but_not_with_place(tmp_path: Path):
    manifest = make(tmp_path)
    first, second = manifest.shards
    digests = {
        manifest.digest,
        replace(manifest, shards=(second, first)).digest,
        replace(manifest, shards=(first,)).digest,
        replace(manifest, shards=(replace(first, sha256="f" * 64), second)).digest,
        replace(manifest, classes=("Hündchen", "Katze")).digest,
    }
    assert len(digests) == 5
    assert all(len(digest) <= 36 and int(digest, 16) >= 0 for digest in digests)
    assert replace(manifest, root=Path("elsewhere"), source="y").digest == manifest.digest


def test_missing_folder_or_manifest_says_what_to_do(tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere.*shardvit pack SOURCE OUT"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"manifest\.json.*shardvit pack SOURCE OUT"):
        read_manifest(tmp_path)
    write_manifest(make(tmp_path / "train"))
    with pytest.raises(UserError, match=rf"did you mean {tmp_path / 'train'}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"version": 99}', "\x00", "[" * 100_000, "[1, " + "9" * 5000])
def test_broken_json_and_unknown_version(tmp_path: Path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("key", ["name", "split", "source", "classes", "label_map", "labels", "shards", "num_samples"])
def test_missing_or_mistyped_entry_is_named(tmp_path: Path, key: str):
    write_manifest(make(tmp_path))
    edit(tmp_path, **{key: None})
    with pytest.raises(UserError, match=key):
        read_manifest(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    del content[key]
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=key):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 4}, "num_samples"),
        ({"classes": []}, "classes"),
        ({"classes": ["a", "a"]}, "classes"),
        ({"classes": ["b", "a"]}, "label_map"),
        ({"shards": [1]}, "shards"),
        ({"labels": {}}, "labels.part"),
        ({"channels": 17}, "channels"),
        ({"channels": 4, "dtype": "int8"}, "dtype"),
        ({"labels": {"part": "json", "key": None, "kind": "single"}}, "'labels'.* a label in json needs a key"),
        ({"shards": [{"file": "x-000000.tar", "num_samples": -1, "num_bytes": 512, "sha256": ""}]}, "num_samples"),
        ({"shards": [{"file": "x-000000.tar", "num_samples": True, "num_bytes": 512, "sha256": ""}]}, "num_samples"),
    ],
)
def test_contradictions(tmp_path: Path, change: dict[str, object], message: str):
    write_manifest(make(tmp_path))
    edit(tmp_path, **change)
    with pytest.raises(UserError, match=message):
        read_manifest(tmp_path)


def test_absent_and_resized_shards_are_named(tmp_path: Path):
    write_manifest(make(tmp_path))
    (tmp_path / "x-000001.tar").write_bytes(bytes(1023))
    with pytest.raises(UserError, match=r"x-000001\.tar.*1023 bytes.*1024"):
        read_manifest(tmp_path)
    (tmp_path / "x-000001.tar").unlink()
    with pytest.raises(UserError, match=r"x-000001\.tar.*not there"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("file", ["../secret.tar", "/etc/passwd", "a/../../secret.tar", "..", "", "a\\..\\b", "a\0b"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, file: str):
    (tmp_path / "secret.tar").write_bytes(bytes(512))
    root = tmp_path / "shards"
    write_manifest(make(root))
    edit(root, shards=[{"file": file, "num_samples": 3, "num_bytes": 512, "sha256": ""}])
    with pytest.raises(UserError, match="inside the folder"):
        read_manifest(root)


def test_a_failed_write_leaves_the_old_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    manifest = make(tmp_path)
    write_manifest(manifest)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_manifest(replace(manifest, name="other"))
    assert read_manifest(tmp_path) == manifest
    assert not list(tmp_path.glob(".*"))


def test_timm_info_lists_each_split_relative_to_the_parent(tmp_path: Path):
    manifests = [make(tmp_path / "train"), replace(make(tmp_path / "val"), split="val")]
    splits: Any = timm_info(manifests)["splits"]
    assert splits["val"] == {
        "name": "val",
        "num_samples": 3,
        "filenames": ["val/x-000000.tar", "val/x-000001.tar"],
        "shard_lengths": [1, 2],
    }


@given(st.binary(max_size=300))
def test_any_bytes_are_either_a_manifest_or_a_user_error(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    root = tmp_path_factory.mktemp("any")
    (root / "manifest.json").write_bytes(data)
    with pytest.raises(UserError, match=r"manifest\.json"):
        read_manifest(root)


def test_needs_neither_torch_nor_numpy():
    code = "import sys, shardvit.data_shards.shards.manifest; print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_labels_are_kept(tmp_path: Path):
    manifest = make(tmp_path)
    write_manifest(manifest)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["labels"] == {"part": "cls", "key": None, "kind": "single"}
    assert read_manifest(tmp_path) == manifest
    several = replace(manifest, labels=LabelSpec("json", "label", "multi"))
    write_manifest(several)
    assert read_manifest(tmp_path) == several and several.digest != manifest.digest


def test_the_digest_of_sets_made_before_there_were_other_labels(tmp_path: Path):
    assert make(tmp_path).digest == "55367d02e3c8fa44426571efafac735b"


def test_without_digests_of_shards_their_names_and_sizes_count(tmp_path: Path):
    manifest = make(tmp_path)
    first, second = (replace(shard, sha256="") for shard in manifest.shards)
    digests = [
        replace(manifest, shards=shards).digest
        for shards in [(first, second), (second, first), (first, replace(second, num_bytes=1)), manifest.shards]
    ]
    assert len(set(digests)) == 4
