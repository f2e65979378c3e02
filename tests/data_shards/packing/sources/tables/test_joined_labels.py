"""Labels joined by key: the same set as by a list, whatever the table and wherever the images lie."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.label_list import LabelList
from shardvit.data_shards.packing.sources.tables import joined_labels
from tests.data_shards.packing.sources.places import CLASSES, EXPECTED, IMAGES, images_of, open_at, tar_of
from tests.data_shards.packing.sources.tables.test_tables import NAMES, hub_table, write_parquet

ROWS = [(name, name.partition("/")[0]) for name in sorted(IMAGES, key=lambda name: name[::-1])]


def csv_of(rows: list[tuple[str, str]], path: Path) -> Path:
    path.write_text(
        "id,path,label\n" + "".join(f'"a, ""b""\n{n}",{key},{label}\n' for n, (key, label) in enumerate(rows))
    )
    return path


def jsonl_of(rows: list[tuple[str, str]], path: Path) -> Path:
    path.write_text("".join(json.dumps({"path": key, "label": label}) + "\n" for key, label in rows))
    return path


def parquet_of(rows: list[tuple[str, str]], path: Path) -> Path:
    keys, labels = zip(*rows, strict=True)
    pq.write_table(pa.table({"path": keys, "label": labels}), path, row_group_size=3)
    return path


WRITERS = {"csv": csv_of, "jsonl": jsonl_of, "parquet": parquet_of}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in IMAGES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    return tmp_path / "in"


@pytest.mark.parametrize("kind", WRITERS)
def test_a_joined_table_gives_what_a_list_gives(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = WRITERS[kind](ROWS, tmp_path / f"labels.{kind}")
    listed = open_at(folder, tmp_path, labels=LabelList(jsonl_of(ROWS, tmp_path / "list.jsonl")))
    monkeypatch.setattr(joined_labels, "_MOST_HELD_BYTES", 0)
    monkeypatch.setattr(joined_labels, "_ROWS_AT_ONCE", 4)
    joined = open_at(folder, tmp_path, labels=LabelList(table))
    assert images_of(joined) == images_of(listed) == EXPECTED
    assert joined.classes == CLASSES and joined.kind == "single"


@pytest.mark.parametrize("kind", WRITERS)
def test_tars_and_tables_by_path_or_key(kind: str, tmp_path: Path) -> None:
    keyed = {f"{row:04d}": name for row, name in enumerate(IMAGES)}
    (tmp_path / "tars").mkdir()
    for part in (0, 1):
        members = {f"{key}.jpg": IMAGES[name] for key, name in [*keyed.items()][part::2]}
        (tmp_path / f"tars/{part:05d}.tar").write_bytes(tar_of(members))
    rows = [(key, name.partition("/")[0]) for key, name in keyed.items()]
    by_key = WRITERS[kind](rows, tmp_path / f"keys.{kind}")
    by_path = WRITERS[kind]([(f"{int(key) % 2:05d}/{key}.jpg", label) for key, label in rows], tmp_path / f"p.{kind}")
    for labels in (by_key, by_path):
        assert images_of(open_at(tmp_path / "tars", tmp_path / "work", labels=LabelList(labels))) == EXPECTED
    write_parquet(
        pa.table({"path": [*keyed], "jpg": [IMAGES[name] for name in keyed.values()]}), tmp_path / "x.parquet"
    )
    assert images_of(open_at(tmp_path / "x.parquet", tmp_path / "work", labels=LabelList(by_key))) == EXPECTED
    unlabelled = write_parquet(hub_table(label=False), tmp_path / "hub.parquet")
    by_name = WRITERS[kind](ROWS, tmp_path / f"names.{kind}")
    assert images_of(open_at(unlabelled, tmp_path / "work", labels=LabelList(by_name))) == EXPECTED


def test_what_either_side_lacks_is_counted_and_named(folder: Path, tmp_path: Path) -> None:
    rows = [*ROWS[2:], ("cat/none.jpg", "cat"), ("dog/none.jpg", "unicorn")]
    source = open_at(folder, tmp_path, labels=LabelList(parquet_of(rows, tmp_path / "x.parquet")))
    assert source.num_images == len(IMAGES) - 2 and source.classes == CLASSES
    notes = " ".join(source.notes)
    assert "2 images" in notes and "2 rows" in notes and "cat/none.jpg" in notes
    assert min(name for name, _ in ROWS[:2]) in notes or max(name for name, _ in ROWS[:2]) in notes


def test_a_name_of_several_images_is_no_key(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "b/1.jpg", "b/2.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    rows = [("1", "x"), ("2", "y"), ("a/1.jpg", "z")]
    source = open_at(tmp_path / "in", tmp_path, labels=LabelList(parquet_of(rows, tmp_path / "x.parquet")))
    assert images_of(source) == {("train", "y", b"b/2.jpg"), ("train", "z", b"a/1.jpg")}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*ROWS, ROWS[3], ROWS[4]], f"2 rows.*{ROWS[3][0]}"),
        ([("x", "cat")], "none of its 1 row such as x .*--path-column"),
        ([(name, "") for name, _ in ROWS], "has a label"),
    ],
)
def test_what_cannot_be_joined_is_said(rows: list[tuple[str, str]], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_at(folder, tmp_path, labels=LabelList(parquet_of(rows, tmp_path / "x.parquet")))
    assert "\n" not in str(caught.value)


def test_several_labels_numbers_and_class_names(folder: Path, tmp_path: Path) -> None:
    several = write_parquet(
        pa.table({"path": NAMES, "label": [[row % 3, (row + 1) % 3] if row else [] for row in range(len(NAMES))]}),
        tmp_path / "x.parquet",
    )
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\n")
    source = open_at(folder, tmp_path, labels=LabelList(several, class_names=tmp_path / "names.txt"))
    assert source.kind == "multi" and source.classes == ("a", "b", "c", "d")
    images = source.splits["train"]
    found = {images.trace(row): {*images.labels[row].tolist()} - {-1} for row in range(len(images))}
    assert found == {name: {row % 3, (row + 1) % 3} if row else set() for row, name in enumerate(NAMES)}


def test_equal_hashes_are_told_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def few(keys: list[str]) -> np.ndarray:
        return np.array([len(key) % 2 for key in keys], np.uint64)

    monkeypatch.setattr(joined_labels, "key_hashes", few)
    source = open_at(folder, tmp_path, labels=LabelList(parquet_of(ROWS, tmp_path / "x.parquet")))
    assert images_of(source) == EXPECTED


def test_ten_times_the_rows_take_no_more_memory(folder: Path, tmp_path: Path) -> None:
    """What is kept of a table is what the images need: rows of others leave nothing."""
    import tracemalloc

    peaks: list[int] = []
    for count in (100_000, 1_000_000):
        keys = [f"none/{row}" for row in range(count)]
        pq.write_table(pa.table({"path": keys, "label": keys}), tmp_path / "x.parquet", row_group_size=10_000)
        del keys
        with pq.ParquetWriter(
            tmp_path / "y.parquet", pa.schema([("path", pa.string()), ("label", pa.string())])
        ) as out:
            for batch in pq.ParquetFile(tmp_path / "x.parquet").iter_batches(10_000):
                out.write_batch(batch)
            out.write_table(pa.table({"path": [key for key, _ in ROWS], "label": [label for _, label in ROWS]}))
        tracemalloc.start()
        assert images_of(open_at(folder, tmp_path, labels=LabelList(tmp_path / "y.parquet"))) == EXPECTED
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + 5_000_000
