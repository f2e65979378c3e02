"""img2dataset's output as a source, and shards packed from anywhere."""

import dataclasses
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shardvit.data_shards.engines.engine import LocalEngine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.sets.statistics_summary import summarise
from shardvit.data_shards.shards.manifest import read_manifest
from shardvit.data_shards.shards.row_bitmap import pack_rows
from shardvit.data_shards.store.ranges import list_url, read_whole
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.sources.places import (
    CLASSES,
    Put,
    Triple,
    images_of,
    open_at,
    put_all,
    refused_at,
    tar_of,
    write,
)
from tests.data_shards.written import write_manifest

# ---- img2dataset's output (its writers: webdataset, files)


def img2dataset(folder: Path, *, files: bool) -> set[Triple]:
    """Two shards of six URLs, of which two could not be fetched, as img2dataset 1.47 writes them."""
    from shardvit.data_shards.shards.webdataset_parts import part

    expected: set[Triple] = set()
    folder.mkdir()
    for shard in range(2):
        rows: list[dict[str, Any]] = []
        stream = io.BytesIO()
        with part("writer").TarWriter(stream) as tar:
            for number in range(3):
                key, found = f"{shard:05d}{number:04d}", number != 1
                meta = {"url": f"http://images/{key}", "caption": f"a photo, {number}", "class": CLASSES[number]}
                meta |= {"key": key, "status": "success" if found else "failed_to_download"}
                meta |= {"error_message": None if found else "HTTP Error 404"}
                meta |= dict.fromkeys(("width", "height", "original_width", "original_height"), 8 if found else None)
                meta |= {"exif": "{}", "sha256": key * 4 if found else None}
                rows.append(meta)
                if found:
                    data = f"image {key}".encode()
                    expected.add(("train", CLASSES[number], data))
                    sample = {"jpg": data, "txt": meta["caption"], "json": json.dumps(meta, indent=4)}
                    tar.write({"__key__": key, **sample})
                    for end, content in sample.items() if files else ():
                        content = content if isinstance(content, bytes) else content.encode()
                        write(folder, {f"{shard:05d}/{key}.{end}": content})
        if not files:
            (folder / f"{shard:05d}.tar").write_bytes(stream.getvalue())
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{shard:05d}.parquet")
        stats = {
            "count": 3,
            "successes": 2,
            "failed_to_download": 1,
            "status_dict": {"success": 2, "HTTP Error 404": 1},
        }
        (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats, indent=4))
    return expected


@pytest.mark.parametrize("files", [False, True])
def test_img2dataset_s_output(tmp_path: Path, s3: FaultServer, put: Put, files: bool):
    folder = tmp_path / "laion"
    expected = img2dataset(folder, files=files)
    put_all(put, "laion", {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*.*")})
    for number, place in enumerate((folder, "s3://shards/laion")):
        source = open_at(place, tmp_path / f"work{number}", label="json:class")
        assert images_of(source) == expected and source.classes == ("cat", "owl")
        assert source.splits["train"].trace(0) == "00000/000000000.jpg"
        refused_at(place, tmp_path, "json:KEY" if files else "json:class")


# ---- packed


def digests(out: Path) -> dict[str, str]:
    return {
        str(tar.relative_to(out)): hashlib.sha256(tar.read_bytes()).hexdigest() for tar in sorted(out.rglob("*.tar"))
    }


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (number, number, number)).save(stream, format="PNG")
    return stream.getvalue()


def test_packed_from_anywhere_the_shards_are_the_same(tmp_path: Path, s3: FaultServer, put: Put):
    folders = {f"{CLASSES[n % 3]}/{n:02d}.png": png(n) for n in range(30)}
    tars = {
        f"{t:03d}.tar": tar_of(
            {
                f"{n:02d}.{end}": data
                for n in range(t, 30, 3)
                for end, data in (("png", png(n)), ("cls", b"%d" % (n % 3)))
            }
        )
        for t in range(3)
    }
    put_all(put, "folders", folders)
    put_all(put, "raw", tars)

    def packed(name: str, spec: Path | str) -> dict[str, str]:
        pack(str(spec), tmp_path / name, name="set", samples_per_shard=8, holdout=0.2, report=lambda line: None)
        return digests(tmp_path / name)

    here = packed("a", write(tmp_path / "folders", folders))
    assert len(here) == 4 and packed("b", "s3://shards/folders") == here
    here = packed("c", write(tmp_path / "raw", tars))
    assert packed("d", "s3://shards/raw/{000..002}.tar") == here
    assert packed("e", f"{s3.url}/shards/raw/{{000..002}}.tar") == here
    with pytest.raises(UserError, match="leave out"):
        open_at(tmp_path / "c", tmp_path, label="cls")
    pack(str(tmp_path / "c"), tmp_path / "f", name="set", samples_per_shard=5, report=lambda line: None)
    before, after = (open_at(tmp_path / name, tmp_path / "work") for name in ("c", "f"))
    assert images_of(before) == images_of(after) and {*before.splits} == {"train", "val"}
    put_all(
        put, "set", {str(each.relative_to(tmp_path / "c")): each.read_bytes() for each in (tmp_path / "c").rglob("*.*")}
    )
    assert images_of(open_at("s3://shards/set", tmp_path / "work")) == images_of(before)
    manifest = read_manifest(tmp_path / "c/train")
    first = manifest.shards[0]
    some = dataclasses.replace(first, num_samples=2, rows=pack_rows(np.arange(first.num_samples) % 4 == 1))
    write_manifest(dataclasses.replace(manifest, shards=(some,)), file="manifest-some.json")
    chosen = open_at(tmp_path / "c/train/manifest-some.json", tmp_path / "work")
    assert images_of(chosen) < images_of(before) and len(chosen.splits["train"]) == 2


def test_a_cluster_s_packing_into_a_bucket_lists_and_decompresses_there_and_leaves_nothing(
    tmp_path: Path, s3: FaultServer, put: Put
):
    members = [(f"{n:02d}", png(n), b"%d" % (n % 2)) for n in range(12)]
    for tar in range(2):
        content = {
            f"{key}.{end}": data
            for key, *both in members[tar::2]
            for end, data in zip(("png", "cls"), both, strict=True)
        }
        put(f"raw/{tar}.tar.gz", tar_of(content, gz=True))
    request = {"name": "set", "samples_per_shard": 5, "report": lambda line: None}
    pack("s3://shards/raw", tmp_path / "here", **request)
    pack("s3://shards/raw", "s3://shards/out", engine=LocalEngine(1), **request)
    here = {
        f"{split}/{shard.file}": shard.sha256
        for split in ("train",)
        for shard in read_manifest(tmp_path / "here/train").shards
    }
    names = [name for name, _, _ in list_url("s3://shards/out")]
    there = {
        name: hashlib.sha256(read_whole(f"s3://shards/out/{name}")).hexdigest()
        for name in names
        if name.endswith(".tar")
    }
    assert here == there and len(here) == 3
    assert not [name for name in names if name.startswith(".packing/")]
    assert any("/out/.packing/spool/" in path for _, path, _ in s3.requests)
    assert any("/out/.packing/listing/" in path for _, path, _ in s3.requests)


def test_rows_without_an_image_and_tars_that_are_cut_are_lines_of_unreadable_jsonl(tmp_path: Path):
    images, names = [png(n) for n in range(9)], [*"ab"] * 4 + ["a"]
    tables = {"train-0": ([*images[:4], None, b""], [*names[:6]]), "train-1": ([None, *images[4:]], [*names[:5], None])}
    write(tmp_path / "raw", {"set/0.tar": (whole := tar_of({"1.png": images[0], "1.cls": b"0"})), "set/1.tar": whole})
    (tmp_path / "raw/set/1.tar").write_bytes(
        tar_of({"1.png": images[1], "1.cls": b"0", "2.png": images[2] * 9})[: 512 * 5]
    )
    (tmp_path / "tables").mkdir()
    for name, (data, labels) in tables.items():
        pq.write_table(pa.table({"image": data, "label": labels}), tmp_path / f"tables/{name}.parquet")
    row_lines = [("train-0.parquet", 4), ("train-0.parquet", 5), ("train-1.parquet", 0), ("train-1.parquet", 5)]
    for source, expected, told in (
        ("tables", row_lines, r"4 of 12 rows .*train-0\.parquet row 4 has no image"),
        ("raw/set", [(str(tmp_path / "raw/set/1.tar"), None)], r"1\.tar: .*cut short"),
    ):
        out = tmp_path / source.replace("/", "-").upper()
        with pytest.raises(UserError, match=f"{told}.*--skip-unreadable"):
            pack(str(tmp_path / source), out.with_name("refused"), report=lambda line: None)
        made = pack(str(tmp_path / source), out, unreadable="skip", report=lambda line: None)
        lines = [json.loads(line) for line in (out / "unreadable.jsonl").read_text().splitlines()]
        assert [(line["path"], line.get("row")) for line in lines] == expected
        assert {(line["split"], line["label"]) for line in lines} == {("train", None)} and lines[0]["reason"]
        lost = len(expected)
        assert made.counts.unreadable == summarise(str(out / "train")).unreadable == lost
        assert pack(str(tmp_path / source), out, unreadable="skip", report=lambda line: None).counts == made.counts
