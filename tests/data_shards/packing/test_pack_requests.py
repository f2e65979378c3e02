"""Requests: refused, recognised, and what the newer options give at the end."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing import pack as pack_module
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.packing.sources.label_list import LabelList
from shardvit.data_shards.shards.labels import LabelSpec, parse_label
from shardvit.data_shards.shards.manifest import read_manifest
from shardvit.data_shards.shards.tar_index import open_index
from tests.data_shards.packing.folders import encoded, quiet, tree, write_folder

# ---- bad input, and what is there already


def test_an_unlistable_request_writes_nothing(tmp_path: Path):
    write_folder(tmp_path / "in", {"cat": 2, "dog": 1})
    before = sorted(tmp_path.iterdir())
    for arguments, message in (
        ({"classes": ["cta"]}, "did you mean 'cat'"),
        ({"classes": ["cat", "cat"]}, "'cat' is named twice"),
        ({"classes": []}, "classes: the list is empty"),
        ({"holdout": 0.0}, "between 0 and 1"),
        ({"holdout": 1.5}, "between 0 and 1"),
        ({"holdout": float("nan")}, "between 0 and 1"),
        ({"holdout": 0.5}, "'dog'.*one image only"),
        ({"samples_per_shard": 0}, "samples-per-shard"),
        ({"shard_size_bytes": 0}, "shard-size"),
    ):
        with pytest.raises(UserError, match=message):
            quiet(str(tmp_path / "in"), tmp_path / "out", **arguments)
    assert sorted(tmp_path.iterdir()) == before


def test_the_same_request_again_is_recognised_and_changes_nothing(tmp_path: Path):
    write_folder(tmp_path / "in", {"cat": 4, "dog": 4})
    spec = str(tmp_path / "in")
    first = quiet(spec, tmp_path / "out", holdout=0.25, classes=["dog", "cat"])
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    lines: list[str] = []
    again = pack(spec, tmp_path / "out", name="in", holdout=0.25, classes=["dog", "cat"], report=lines.append)
    assert again.compared and (again.train, again.val) == (first.train, first.val)
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert "was packed before" in lines[1] and "8 images of 2 classes" in lines[1]


def test_it_speaks_while_a_slow_disk_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path / "in", {"cat": 4, "dog": 1})
    lines: list[str] = []
    spoken = threading.Event()
    listing = pack_module.open_source

    def report(line: str) -> None:
        lines.append(line)
        spoken.set()

    def slow(*args: Any, **options: Any) -> Any:
        assert spoken.wait(60)
        return listing(*args, **options)

    monkeypatch.setattr(pack_module, "open_source", slow)
    monkeypatch.setattr(pack_module, "_SAID_SECONDS", 0.01)
    pack(str(tmp_path / "in"), tmp_path / "out", report=report)
    assert "listing" in lines[0] and lines[1] == f"{tmp_path / 'in'}: 5 images of 2 classes found"


def test_another_request_or_a_changed_source_or_a_strange_folder_is_refused(tmp_path: Path):
    write_folder(tmp_path / "in", {"cat": 4, "dog": 4})
    spec = str(tmp_path / "in")
    quiet(spec, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(UserError, match="seed: 0 then, 1 now"):
        quiet(spec, tmp_path / "out", seed=1)
    with pytest.raises(UserError, match="source"):
        quiet("digits", tmp_path / "out")
    (tmp_path / "in/cat/new.png").write_bytes(encoded(99))
    with pytest.raises(UserError, match="has changed since"):
        quiet(spec, tmp_path / "out")
    assert tree(tmp_path / "out") == before
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not packed by shardvit"):
        quiet(spec, tmp_path / "strange")
    assert (tmp_path / "strange/thesis.txt").read_text() == "mine"
    with pytest.raises(UserError, match="not packed by shardvit"):
        quiet(spec, tmp_path / "strange/thesis.txt")


def test_an_empty_out_is_filled_and_parents_are_made(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    quiet("digits", tmp_path / "empty", classes=["0"])
    quiet("digits", tmp_path / "x/y/z", classes=["0"])
    assert tree(tmp_path / "empty") == tree(tmp_path / "x/y/z")
    assert not list(tmp_path.rglob("*.packing"))


def test_a_damaged_result_is_not_reused(tmp_path: Path):
    result = quiet("digits", tmp_path / "out", classes=["0", "1"])
    result.train.shard_paths[0].unlink()
    with pytest.raises(UserError, match="not there"):
        quiet("digits", tmp_path / "out", classes=["0", "1"])


def test_two_at_once_do_not_mix(tmp_path: Path):
    import fcntl

    (tmp_path / ".out.packing").mkdir()
    handle = os.open(tmp_path / ".out.packing", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another process is packing"):
        quiet("digits", tmp_path / "out", classes=["0"])
    os.close(handle)
    quiet("digits", tmp_path / "out", classes=["0"])


def test_file_names_and_pack_json(tmp_path: Path):
    pack("digits", tmp_path / "out", classes=["0", "1"], holdout=0.5, samples_per_shard=100, report=lambda line: None)
    assert set(tree(tmp_path / "out")) == {
        "pack.json",
        "images.bin",
        "_info.json",
        *(
            f"{split}/{file}"
            for split in ("train", "val")
            for file in ("manifest.json", "sizes.json", "statistics.parquet")
        ),
        *(
            f"{split}/out-{split}-00000{i}.{kind}"
            for split in ("train", "val")
            for i in (0, 1)
            for kind in ("tar", "idx")
        ),
    }
    content = json.loads((tmp_path / "out/pack.json").read_text())
    assert content["request"] == {
        "source": "digits",
        "classes": ["0", "1"],
        "holdout": 0.5,
        "samples_per_shard": 100,
        "seed": 0,
    }
    assert set(content["found"].values()) == {0}


# ---- several labels, sizes, reduced images: what comes out at the end


def test_several_labels_round_trip_through_our_reader_and_webdataset(tmp_path: Path):
    root = tmp_path / "in"
    owner = list(write_folder(root, {"a": 6}))
    rows = [["cat"], ["dog", "cat"], [], ["owl"], ["owl", "cat", "dog"], ["dog"]]
    files = sorted((root / "a").iterdir())
    images = [path.read_bytes() for path in files]
    assert set(images) == set(owner)
    lines = [json.dumps({"path": f"a/{path.name}", "label": labels}) for path, labels in zip(files, rows, strict=True)]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    result = quiet(str(root), tmp_path / "out", labels=LabelList(tmp_path / "labels.jsonl"), samples_per_shard=4)
    manifest = read_manifest(tmp_path / "out/train")
    assert manifest.labels == LabelSpec(part="json", key="label", kind="multi") == result.train.labels
    assert manifest.classes == ("cat", "dog", "owl")
    expected = {
        image: tuple(sorted(manifest.classes.index(name) for name in labels))
        for image, labels in zip(images, rows, strict=True)
    }
    found = {}
    for path in manifest.shard_paths:
        index, data = open_index(path, label="json"), path.read_bytes()
        for i in range(len(index)):
            image = data[index.image_offset[i] :][: index.image_size[i]]
            label = data[index.label_offset[i] :][: index.label_size[i]]
            found[image] = parse_label(label, spec=manifest.labels, label_map=manifest.label_map, num_classes=3)
    assert found == expected

    import webdataset

    data = webdataset.WebDataset([str(path) for path in manifest.shard_paths], shardshuffle=False, empty_check=False)
    by_others = {sample.get("jpg", sample.get("png")): tuple(json.loads(sample["json"])["label"]) for sample in data}
    assert by_others == expected


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(UserError, match=r"need about \S+ [kM]B and 100 kB are free"):
        quiet("digits", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_importing_needs_no_torch():
    heavy = "{'torch', 'webdataset', 'sklearn', 'PIL'}"
    code = "import sys, shardvit.data_shards.packing.pack, shardvit.data_shards.packing.sources; "
    code += f"print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
