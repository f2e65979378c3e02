"""Tables as sources: the images and labels of the class folders that they were made from, however they are written."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.tables.columns import open_schema
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.sources.opening import touch
from tests.data_shards.packing.sources.places import CLASSES, EXPECTED, IMAGES, Put, images_of, open_at

NAMES, BYTES = sorted(IMAGES, key=lambda name: name[::-1]), dict(IMAGES)
LABELS = [CLASSES.index(name.partition("/")[0]) for name in NAMES]


def hub_table(names: list[str] = NAMES, *, label: bool = True, split: str = "") -> pa.Table:
    """A table as Hugging Face's `datasets` writes it, with the names of the labels in its schema."""
    features = {"image": {"_type": "Image"}, "label": {"names": [*CLASSES], "_type": "ClassLabel"}}
    columns: dict[str, Any] = {"image": [{"bytes": BYTES[name], "path": name} for name in names]}
    if label:
        columns["label"] = [CLASSES.index(name.partition("/")[0]) for name in names]
    table = pa.table(columns)
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def plain_table(**more: list[Any]) -> pa.Table:
    return pa.table({"jpg": [BYTES[name] for name in NAMES], "label": [CLASSES[label] for label in LABELS], **more})


def write_arrow(table: pa.Table, path: Path, *, form: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new: Callable[..., Any] = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def write_parquet(table: pa.Table, path: Path, *, rows: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def img2dataset(folder: Path) -> Path:
    """What its parquet writer leaves: a table and a JSON of statistics for each shard; rows that failed have no jpg."""
    for shard in (0, 1):
        names = NAMES[shard::2]
        rows = {
            "key": [f"{shard:05d}{row:04d}" for row in range(len(names))],
            "jpg": [BYTES[name] for name in names],
            "txt": [name for name in names],
            "url": [f"http://x/{name}" for name in names],
            "caption": [f"a photo of {name}" for name in names],
            "class": [name.partition("/")[0] for name in names],
            "status": ["success"] * len(names),
            "width": [8] * len(names),
            "exif": ["{}"] * len(names),
            "sha256": ["0" * 64] * len(names),
        }
        write_parquet(pa.table(rows), folder / f"{shard:05d}.parquet")
        (folder / f"{shard:05d}_stats.json").write_text("{}")
    return folder


def on_disk(folder: Path) -> Path:
    """What `save_to_disk` leaves."""
    write_arrow(hub_table(), folder / "data-00000-of-00001.arrow", form="stream")
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")
    return folder


def pushed(folder: Path) -> Path:
    """What `push_to_hub` leaves, with a script beside it."""
    write_parquet(hub_table(NAMES[:10]), folder / "data/train-00000-of-00002.parquet")
    write_parquet(hub_table(NAMES[10:]), folder / "data/train-00001-of-00002.parquet")
    touch(folder, "README.md", ".gitattributes", "script.py")
    return folder


def paths(folder: Path) -> Path:
    for name, data in IMAGES.items():
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / name).write_bytes(data)
    top = folder.resolve()
    given = [f"data/{name}" if row % 2 else f"{top}/data/{name}" for row, name in enumerate(NAMES)]
    table = pa.table({"file_name": given, "class": [CLASSES[label] for label in LABELS]})
    return write_parquet(table, folder / "metadata.parquet")


def feather(folder: Path) -> Path:
    write_arrow(plain_table(), folder / "all.feather", form="file")
    return folder / "all.feather"


MADE = (pushed, on_disk, img2dataset, paths, feather)


@pytest.mark.parametrize("make", MADE)
def test_a_table_gives_the_images_and_labels_of_the_class_folders(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "source")
    monkeypatch.setattr("shardvit.data_shards.packing.sources.tables.columns._PART_BYTES", 2000)
    source = open_at(made, tmp_path / "work")
    assert images_of(source) == EXPECTED
    assert source.classes == CLASSES
    assert source.left_out == () and source.num_images == len(IMAGES)


def test_row_groups_become_parts_and_their_order_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(hub_table(), tmp_path / "x.parquet")
    monkeypatch.setattr("shardvit.data_shards.packing.sources.tables.columns._PART_BYTES", 1)
    parts = open_schema(str(path))[1]
    assert [(part.first, part.begin) for part in parts] == [(group, 4 * group) for group in range(6)]

    class Backwards:
        workers = 1

        def run(self, work: Any, request: Any, parts: Any, *, done: Any) -> Any:
            return {part: work(request, part) for part in reversed(parts)}

    from shardvit.data_shards.packing.sources.archive import Unpacking
    from shardvit.data_shards.packing.sources.recognise import open_source

    there, back = (
        open_at(path, tmp_path / "a"),
        open_source(str(path), unpacking=Unpacking(tmp_path / "b", lambda line: None, Backwards())),
    )
    assert there.fingerprint() == back.fingerprint()
    assert [there.splits["train"].trace(row) for row in range(21)] == NAMES
    assert np.array_equal(there.splits["train"].stamps, back.splits["train"].stamps)


def test_listed_parts_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(hub_table(), tmp_path / "x.parquet")
    first = open_at(path, tmp_path / "work")
    monkeypatch.setattr("shardvit.data_shards.packing.sources.tables.table_listing.read_rows", None)
    assert open_at(path, tmp_path / "work").fingerprint() == first.fingerprint()


def test_splits_are_told_by_files_and_folders_and_an_unlabelled_one_is_left_out(tmp_path: Path) -> None:
    for folder in ("data", "train"):
        top = tmp_path / folder
        of = "{split}/0000.parquet" if folder == "train" else "data/{split}-00000-of-00001.parquet"
        write_parquet(hub_table(NAMES[:12]), top / of.format(split="train"))
        write_parquet(hub_table(NAMES[12:]), top / of.format(split="validation"))
        bare = hub_table(NAMES[:3]).set_column(1, "label", pa.array([-1] * 3))
        write_parquet(bare, top / of.format(split="test"))
        source = open_at(top, tmp_path / "work", unfit="refuse")
        assert {split: len(images) for split, images in source.splits.items()} == {"train": 12, "val": 9}
        assert any("test" in note for note in source.notes)


def test_a_table_of_no_split_among_those_of_splits_is_named(tmp_path: Path) -> None:
    for name in ("train/0.parquet", "stray.parquet"):
        write_parquet(hub_table(NAMES[:3]), tmp_path / "set" / name)
    with pytest.raises(UserError, match=r"stray\.parquet is of no split"):
        open_at(tmp_path / "set", tmp_path / "work")


def test_several_labels_an_image(tmp_path: Path) -> None:
    labels: list[list[int]] = [[row % 3, 2] if row % 2 else [] for row in range(len(NAMES))]
    path = write_parquet(pa.table({"image": [BYTES[name] for name in NAMES], "labels": labels}), tmp_path / "x.parquet")
    source = open_at(path, tmp_path / "work")
    assert source.kind == "multi"
    found = [sorted({*row.tolist()} - {-1}) for row in source.splits["train"].labels]
    assert found == [sorted({*each}) for each in labels]


def test_names_that_the_table_repeats_are_replaced(tmp_path: Path) -> None:
    table = pa.table({"image": [{"bytes": b"a", "path": "x.jpg"}, {"bytes": b"b", "path": "x.jpg"}], "label": [0, 1]})
    source = open_at(write_parquet(table, tmp_path / "x.parquet"), tmp_path / "work")
    assert [source.splits["train"].trace(row) for row in range(2)] == ["x/0", "x/1"]


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (pa.table({"a": [b"x"], "b": [b"y"], "label": [0]}), {}, r"a, b.*--image-column"),
        (pa.table({"n": [1], "label": [0]}), {}, r"n, label.*--image-column"),
        (pa.table({"jpg": [b"x"], "label": [0]}), {"image_column": "png"}, r"png.*jpg"),
        (pa.table({"jpg": [b"x"], "label": [0], "fine_label": [1]}), {}, r"label, fine_label.*--label-column"),
        (pa.table({"jpg": [b"x"], "species": ["a"]}), {}, r"species.*--label-column"),
        (pa.table({"jpg": [b"x"], "label": [0.5]}), {}, "label.*double"),
        (pa.table({"jpg": [b"x"], "label": [{"x": 1}]}), {}, "label.*struct"),
        (
            pa.table({"jpg": [b"x", None], "label": [0, 0]}),
            {},
            r"1 of 2 rows .*x\.parquet row 1 has no image.*--skip-unreadable",
        ),
        (
            pa.table({"jpg": [b"x", b"y"], "label": ["a", None]}),
            {},
            r"1 of 2 rows .*x\.parquet row 1 has no label.*--skip-unreadable",
        ),
        (pa.table({"path": ["../x.jpg"], "label": ["a"]}), {}, r"row 0.*\.\./x.jpg"),
        (pa.table({"path": ["http://x/x.jpg"], "label": ["a"]}), {}, "row 0.*img2dataset"),
        (pa.table({"path": ["x.jpg"], "label": ["a"]}), {}, "x.jpg is not a file below"),
    ],
)
def test_what_does_not_fit_is_said(table: pa.Table, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_parquet(table, tmp_path / "x.parquet")
    with pytest.raises(UserError, match=message) as caught:
        open_at(path, tmp_path / "work", **options)
    assert "\n" not in str(caught.value)


def test_what_is_unusable_may_be_skipped(tmp_path: Path) -> None:
    table = pa.table({"jpg": [b"x", None, b""], "label": [0, 0, 0]})
    source = open_at(write_parquet(table, tmp_path / "x.parquet"), tmp_path / "work", unfit="skip")
    assert source.num_images == 1 and [(each.path, each.row) for each in source.left_out] == [
        ("x.parquet", row) for row in (1, 2)
    ]


def test_an_extension_type_is_refused_and_not_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    content = pickle.dumps(type("Run", (), {"__reduce__": lambda self: (os.mkdir, (str(mark),))})())
    field = pa.field(
        "image",
        pa.binary(),
        metadata={"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": content},
    )
    table = pa.table([pa.array([b"x"]), pa.array([0])], schema=pa.schema([field, pa.field("label", pa.int64())]))
    write_arrow(table, tmp_path / "x.arrow", form="file")
    write_parquet(table, tmp_path / "x.parquet")
    for name in ("x.arrow", "x.parquet"):
        with pytest.raises(UserError, match="py_extension_type"):
            open_at(tmp_path / name, tmp_path / "work")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_damage_is_told_by_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_parquet(hub_table(), path) if name == "x.parquet" else write_arrow(hub_table(), path, form="stream")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{name}: it cannot be read as a table"):
        open_at(path, tmp_path / "work")


def test_several_data_sets_in_a_folder_are_named(tmp_path: Path) -> None:
    for config in ("big", "small"):
        write_parquet(hub_table(), tmp_path / config / "train-0.parquet")
    with pytest.raises(UserError, match="big, small"):
        open_at(tmp_path, tmp_path / "work")


KILLED = """
import os, signal, sys
from pathlib import Path
from shardvit.data_shards.engines.engine import LocalEngine
from shardvit.data_shards.packing.sources.archive import Unpacking
from shardvit.data_shards.packing.sources.recognise import open_source
from shardvit.data_shards.packing.sources.tables import columns
from shardvit.data_shards.packing.sources.tars import sample_listing

columns._PART_BYTES = 1
write, left = sample_listing.write_listing, [2]

def killed(*arguments):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    write(*arguments)

class Here:
    workers = 1
    def run(self, work, request, parts, *, done):
        return {part: work(request, part) for part in parts}

sample_listing.write_listing = killed
open_source(sys.argv[1], unpacking=Unpacking(Path(sys.argv[2]), print, Here()))
"""


def test_killed_in_the_middle_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(hub_table(), tmp_path / "x.parquet")
    monkeypatch.setattr("shardvit.data_shards.packing.sources.tables.columns._PART_BYTES", 1)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), str(tmp_path / "work")], check=False)
    assert killed.returncode == -signal.SIGKILL
    before = {each: each.stat().st_mtime_ns for each in (tmp_path / "work/listing").iterdir()}
    assert len(before) == 2
    resumed, whole = open_at(path, tmp_path / "work"), open_at(path, tmp_path / "fresh")
    assert resumed.fingerprint() == whole.fingerprint() and images_of(resumed) == EXPECTED
    assert before == {each: each.stat().st_mtime_ns for each in before}


def test_tables_in_a_bucket(tmp_path: Path, s3: FaultServer, put: Put) -> None:
    for made in (pushed(tmp_path / "hub"), paths(tmp_path / "paths").parent, on_disk(tmp_path / "disk")):
        for path in made.rglob("*"):
            if path.is_file():
                put(f"{made.name}/{path.relative_to(made)}", path.read_bytes())
    rows = [f"s3://shards/paths/data/{name}" for name in NAMES]
    table = pa.table({"path": rows, "label": [CLASSES[label] for label in LABELS]})
    put("paths/urls.parquet", write_parquet(table, tmp_path / "urls.parquet").read_bytes())
    pattern = "s3://shards/hub/data/train-{00000..00001}-of-00002.parquet"
    for spec in ("s3://shards/hub", pattern, "s3://shards/paths/urls.parquet", "s3://shards/disk"):
        assert images_of(open_at(spec, tmp_path / "work")) == EXPECTED


MEMORY = """
import resource, sys
from pathlib import Path
from shardvit.data_shards.packing.sources.tables.table_listing import TablePart, TableParts, list_table
from shardvit.data_shards.packing.sources.tables.columns import Rows, find_columns, open_schema
path, work = sys.argv[1:]
schema, parts = open_schema(path)
columns = find_columns(schema, image=None, label=None, key="", table=path)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
request = TableParts(tuple(TablePart(path, "", "x", rows) for rows in parts), columns, str(Path(path).parent), work)
for number in range(len(parts)):
    list_table(request, number)
print(len(parts), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_is_that_of_a_few_images(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(1 << 20)
    table = pa.table({"jpg": [data[row:] + data[:row] for row in range(100)], "label": [0] * 100})
    with pq.ParquetWriter(path := tmp_path / "x.parquet", table.schema, use_dictionary=False) as writer:
        for _ in range(3):
            writer.write_table(table, row_group_size=300)
    del table
    assert path.stat().st_size > 300_000_000
    asked = [sys.executable, "-c", MEMORY, str(path), str(tmp_path / "work")]
    parts, mebibytes = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    assert int(parts) == 1 and float(mebibytes) < 240  # 64 images of 1 MiB, as Arrow's and as Python's
