"""What an expression says of each sample is what Python says of its row; what is no plain expression is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.sets.where import names_in, rows_where

CLASSES = ("cat", "dog", "eel")
SIZES = {"a.tar": 40, "b.tar": 0, "c.tar": 60}
FACTS = {"shardvit": json.dumps({"shards": list(SIZES), "classes": CLASSES})}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    places = [(shard, row) for shard, size in enumerate(SIZES.values()) for row in range(size)]
    return [
        {
            "shard": shard,
            "row": row,
            "path": f"x/{row}.jpg",
            "labels": [int(draw.integers(3))],
            "width": int(draw.integers(10, 300)),
            "height": int(draw.integers(10, 300)),
            "bytes": int(draw.integers(100, 9000)),
            "mean_r": float(draw.uniform(0, 255)),
            "duplicate": bool(draw.integers(2)),
        }
        for shard, row in places
    ]


@pytest.fixture(scope="module")
def table(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "statistics.parquet"
    content = pa.Table.from_pylist(rows)
    content = content.set_column(0, "shard", content["shard"].cast(pa.int32()))
    pq.write_table(content.replace_schema_metadata(FACTS), path, row_group_size=17)
    return path


def found(text: str, table: Path) -> list[bool]:
    kept = rows_where(text, table, name="statistics.parquet")
    assert {file: len(each) for file, each in kept.items()} == SIZES
    return np.concatenate(list(kept.values())).tolist()


@pytest.mark.parametrize(
    "text",
    [
        "width >= 128 and not duplicate",
        "width >= 128 or height < 20",
        "class_name == 'cat'",
        "class_name in ['cat', 'eel'] and path != 'x/3.jpg'",
        "class_name not in ('cat',)",
        "0.5 < aspect <= 2",
        "pixels > 10_000 and bytes / pixels < 0.5",
        "not (mean_r > 20 and duplicate)",
        "duplicate",
        " width % 2 == -height % 2 ",
        "path == 'x/@y # `z`.__class__'",
    ],
)
def test_it_says_what_python_says_of_each_row(text: str, rows: list[dict[str, Any]], table: Path):
    computed = [
        {
            **row,
            "class_name": CLASSES[row["labels"][0]],
            "pixels": row["width"] * row["height"],
            "aspect": row["width"] / row["height"],
        }
        for row in rows
    ]
    assert found(text, table) == [bool(eval(text.strip(), {}, row)) for row in computed]


@pytest.mark.parametrize("text", ["(width > 100) & ~duplicate", "(width > 100) | duplicate"])
def test_as_pandas_writes_it(text: str, rows: list[dict[str, Any]], table: Path):
    words = text.replace("&", "and").replace("|", "or").replace("~", "not ")
    assert found(text, table) == found(words, table)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "width.__class__ == 1",
        "path.str.len() > 3",
        "@width > 1",
        "width @ height",
        "abs(width) > 3",
        "[x for x in path] == 1",
        "(lambda: width)() > 1",
        "`width` > 1",
        "width > 2 ** 9 ** 9 ** 9",
        "width := 3",
        "width = 3",
        "f'{width}' == '3'",
        "width[0] > 1",
        "width if duplicate else height",
        "path in 'x/1.jpg'",
        "width == None",
        "width is None",
        "width == {1: 2}",
        "wide > 3",
        "shard == 1",
        "labels == 1",
        "1 < 2",
        "",
        "width >",
        "(" * 300 + "width" + ")" * 300,
        "-" * 5000 + "width > 1",
        " or ".join(["width > 1"] * 2000),
        "width\n> 1\n\nheight > 1",
        "\0",
    ],
)
def test_anything_else_is_refused_by_naming_the_columns(text: str, table: Path):
    with pytest.raises(UserError, match="--where") as refused:
        found(text, table)
    assert "duplicate" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["width + 1", "'a' if 0 else width", "width > 'x'", "path", "path + 1 == 2"])
def test_what_is_neither_true_nor_false_is_refused(text: str, table: Path):
    with pytest.raises(UserError, match="--where"):
        found(text, table)


def test_a_comparison_of_a_number_with_a_text_is_explained_in_full(table: Path):
    with pytest.raises(UserError, match=r"cannot be evaluated .*int.*str"):
        found("width > 'x'", table)


def test_nothing_is_found_outside_the_table(table: Path):
    columns = pq.ParquetFile(table).schema_arrow.names
    assert names_in("width > 1 and class_name == 'x'", columns=columns) == ["class_name", "width"]
    with pytest.raises(UserError, match="no column 'SIZES'"):
        found("SIZES == 1", table)


@pytest.mark.parametrize("damage", ["cut", "another", "more shards"])
def test_what_is_no_table_of_a_set_is_refused(table: Path, tmp_path: Path, damage: str):
    path, content = tmp_path / "x", pq.read_table(table)
    if damage == "cut":
        path.write_bytes(table.read_bytes()[:-50])
    elif damage == "another":
        pq.write_table(content.replace_schema_metadata({}), path)
    else:
        pq.write_table(content.set_column(0, "shard", pa.array([9] * len(content), pa.int32())), path)
    with pytest.raises(UserError, match=r"statistics\.parquet: cannot be read"):
        rows_where("width > 1", path, name="statistics.parquet")


@pytest.mark.parametrize("text", ["width * height > 1", "pixels > 1", "width * 100_000 > 1"])
def test_products_are_larger_than_a_columns_32_bits(tmp_path: Path, text: str):
    row = {"shard": 0, "width": 60_000, "height": 60_000}
    schema = pa.schema({name: pa.int32() for name in row}, {"shardvit": json.dumps({"shards": ["a"], "classes": []})})
    pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "x")
    assert rows_where(text, tmp_path / "x", name="x")["a"].tolist() == [True]


def test_several_labels_have_no_class_name(rows: list[dict[str, Any]], tmp_path: Path):
    content = pa.Table.from_pylist([{**row, "labels": [0, 1]} for row in rows])
    pq.write_table(content.replace_schema_metadata(FACTS), tmp_path / "x")
    with pytest.raises(UserError, match="class_name: an image has several labels"):
        found("class_name == 'cat'", tmp_path / "x")
