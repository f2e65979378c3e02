"""Lists of labels: what they may say, in CSV and JSONL, and one clear sentence for every list that cannot be used."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.sources.base import Source
from shardvit.data_shards.packing.sources.label_list import LabelList
from shardvit.data_shards.packing.sources.recognise import open_source
from tests.data_shards.packing.sources.layouts import cifar10, flowers, jpeg, pets, write_files, write_tar
from tests.data_shards.packing.sources.opening import opened as published
from tests.data_shards.packing.sources.opening import refused, touch


def images_of(source: Source) -> dict[str, list[str]]:
    images = source.splits["train"]
    rows = images.labels.reshape(len(images), -1).tolist()
    return {images.trace(i): [source.classes[n] for n in row if n >= 0] for i, row in enumerate(rows)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return touch(tmp_path / "in", "a/1.jpg", "a/2.jpg", "3.png")


def opened(root: Path, content: str | bytes, *, file: str = "labels.csv", **options: object) -> Source:
    path = root.parent / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_source(str(root), labels=LabelList(path, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "classes", "expected"),
    [
        ("a/2.jpg,dog\na/1.jpg,cat\n3.png,dog", "cat dog", {"a/1.jpg": "cat", "a/2.jpg": "dog", "3.png": "dog"}),
        ("a/1.jpg,3\na/2.jpg,0\n3.png,03", "0 1 2 3", {"a/1.jpg": "3", "a/2.jpg": "0", "3.png": "3"}),
        # one name among numbers makes them names
        ("a/1.jpg,10\na/2.jpg,9\n3.png,x", "10 9 x", {"a/1.jpg": "10", "a/2.jpg": "9", "3.png": "x"}),
        (
            "a/1.jpg,dog | cat|dog\na/2.jpg,\n3.png,owl",
            "cat dog owl",
            {"a/1.jpg": ["cat", "dog"], "a/2.jpg": [], "3.png": ["owl"]},
        ),
        (
            {"a/1.jpg": [2, 0], "a/2.jpg": [], "3.png": 1},
            "0 1 2",
            {"a/1.jpg": ["0", "2"], "a/2.jpg": [], "3.png": ["1"]},
        ),
        ({"a/1.jpg": "7", "a/2.jpg": "3", "3.png": "3"}, "3 7", {"a/1.jpg": "7", "a/2.jpg": "3", "3.png": "3"}),
    ],
)
def test_names_and_numbers_one_or_several(root: Path, content: str | dict, classes: str, expected: dict):
    if isinstance(content, str):
        source = opened(root, f"path,label\n{content}\n")
    else:
        lines = [json.dumps({"path": path, "more": {"no": 1}, "label": label}) for path, label in content.items()]
        source = opened(root, "\n\n".join(lines), file="x.JSONL")
    is_multi = any(isinstance(label, list) for label in expected.values())
    assert source.kind == ("multi" if is_multi else "single") and list(source.classes) == classes.split()
    assert images_of(source) == {path: label if is_multi else [label] for path, label in expected.items()}
    images = source.splits["train"]
    assert [images.read(i) for i in range(3)] == [images.trace(i).encode() for i in range(3)] and not source.notes
    assert images.labels.ndim == 1 + is_multi


def test_absolute_paths_inside_the_folder_are_the_relative_ones(root: Path):
    (root.parent / "link").symlink_to(root)
    touch(root.parent / "elsewhere", "x.jpg")
    (root / "linked.jpg").symlink_to(root.parent / "elsewhere/x.jpg")
    relative = ["a/2.jpg", "a/1.jpg", "linked.jpg", "3.png"]
    expected = opened(root, "path,label\n" + "".join(f"{path},cat\n" for path in relative))
    real, link = root.resolve(), root.parent / "link"
    for places in ([real] * 4, [link, real, real, link], [f"{link}/a/..", f"{real}/a/../a/..", real, f"{real}/./"]):
        text = "".join(f"{place}/{path},cat\n" for place, path in zip(places, relative, strict=True))
        for folder in (root, link):
            source = opened(folder, "path,label\n" + text)
            assert images_of(source) == images_of(expected) and source.fingerprint() == expected.fingerprint()
    outside = (root.parent / "elsewhere/x.jpg", f"{root}/../elsewhere/x.jpg", f"{root}-not/a/1.jpg", "/etc/passwd")
    with pytest.raises(UserError) as caught:
        opened(root, "path,label\n" + "".join(f"{path},cat\n" for path in outside))
    assert str(caught.value).count("inside SOURCE") == 4  # all at once
    with pytest.raises(UserError, match=r"line 3: a/1\.jpg is on line 2 of labels\.csv already"):
        opened(root, f"path,label\na/1.jpg,cat\n{real}/a/1.jpg,cat\n")


def test_other_columns_a_mark_of_byte_order_and_windows_lines(root: Path):
    text = '\ufefffile,who,"species name"\r\n"a/1.jpg",me,"cat, grey"\r\n./a//2.jpg,me,dog\r\n'
    source = opened(root, text, path_column="file", label_column="species name")
    assert images_of(source) == {"a/1.jpg": ["cat, grey"], "a/2.jpg": ["dog"]}
    assert len(source.notes) == 1 and "does not name 1 images" in source.notes[0] and "3.png" in source.notes[0]


@pytest.mark.parametrize(
    ("names", "labels", "expected"),
    [
        ("owl\ncat\ndog\n", ["dog", "cat", "owl"], [2, 1, 0]),
        ("owl\ncat\ndog\nelk", ["2", "0", "0"], [2, 0, 0]),
        ("7\n3\n9\n", ["3", "9", "7"], [1, 2, 0]),  # all are names, so they are names
        ("1\n2\n3\n", ["0", "1", "2"], [0, 1, 2]),  # 0 is no name, so they are numbers
    ],
)
def test_a_file_of_class_names_orders_them(root: Path, names: str, labels: list[str], expected: list[int]):
    (root.parent / "names.txt").write_text(names)
    rows = "".join(f"{file},{label}\n" for file, label in zip(("a/1.jpg", "a/2.jpg", "3.png"), labels, strict=True))
    source = opened(root, "path,label\n" + rows, class_names=root.parent / "names.txt")
    assert source.classes == tuple(names.split())
    (root.parent / "names.txt").write_text(json.dumps(names.split()), encoding="utf-8-sig")
    again = opened(root, "path,label\n" + rows, class_names=root.parent / "names.txt")
    assert again.fingerprint() == source.fingerprint()
    assert source.splits["train"].labels.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1), max_size=3),
        min_size=3,
        max_size=3,
    )
)
def test_jsonl_round_trip_and_its_csv_twin(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]):
    root = touch(tmp_path_factory.mktemp("x") / "in", "1.jpg", "2.jpg", "3.jpg")
    if not any(rows):
        return
    lines = [json.dumps({"path": f"{i}.jpg", "label": row}) for i, row in enumerate(rows, start=1)]
    source = opened(root, "\n".join(lines), file="x.jsonl")
    expected = {f"{i}.jpg": sorted(set(row)) for i, row in enumerate(rows, start=1)}
    assert images_of(source) == expected and source.kind == "multi"
    texts = [name for row in rows for name in row]
    if any("|" in name for name in texts) or all(name.isascii() and name.isdigit() for name in texts):
        return
    if all(len(row) < 2 for row in rows):
        return
    with open(root.parent / "x.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["path", "label"])
        writer.writerows([f"{i}.jpg", "|".join(row)] for i, row in enumerate(rows, start=1))
    twin = open_source(str(root), labels=LabelList(root.parent / "x.csv"))
    assert images_of(twin) == expected and twin.classes == source.classes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no column 'path'"),
        ("path,label\n", "names no image"),
        ("file,label\na/1.jpg,x\n", "no column 'path' in its first line, which has 'file', 'label'.*--path-column"),
        ("path,klass\na/1.jpg,x\n", "no column 'label'"),
        ("path,label\na/1.jpg,x\na/2.jpg\n", "line 3: 1 fields where the first line has 2"),
        ("path,label\na/1.jpg,x,y\n", "line 2: 3 fields"),
        ('path,label\n"a/1.jpg,x\n', "not a readable CSV file"),
        (b"path,label\na/\xe9.jpg,x\n", "not UTF-8"),
        ("path,label\na/1.jpg,\na/2.jpg,x\n", "line 2: the label '' is empty"),
        ("path,label\na/1.jpg,x||y\n", "line 2: the label '' is empty"),
        ("path,label\na/1.jpg,x\x07\n", "cannot be written"),
        (
            "path,label\na/1.jpg,x\na/9.jpg,x\n8.jpg,x\n",
            r"line 3: a/9\.jpg is not a file below .*\(1 more are missing\)",
        ),
        ("path,label\na,x\n", "line 2: a is not a file"),
        ("path,label\n/etc/passwd,x\n", "line 2: the path /etc/passwd does not lead"),
        ("path,label\na/../../x.jpg,x\n", "does not lead to a file inside"),
        ("path,label\n,x\n", "does not lead to a file inside"),
        ("path,label\na/1.jpg,x\n./a/1.jpg,x\n", r"line 3: a/1\.jpg is on line 2 of labels\.csv already"),
        ("path,label\na/1.jpg,2000000\n", "would make 2,000,001 classes"),
    ],
)
def test_csv_files_that_are_refused(root: Path, content: str | bytes, message: str):
    with pytest.raises(UserError, match=message) as caught:
        opened(root, content)
    assert str(root.parent / "labels.csv") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no image"),
        ("{", "line 1: not readable as JSON"),
        ('{"path": "a/1.jpg", "label": ' + "9" * 5000 + "}", "line 1: not readable as JSON"),
        ("[]", "line 1: no key 'path'"),
        ('{"path": "a/1.jpg"}', "line 1: no key 'label'"),
        ('{"path": 3, "label": 1}', "line 1: the path 3 is not text"),
        ('{"path": "a/1.jpg", "label": true}', "the label true is neither a class name"),
        ('{"path": "a/1.jpg", "label": 1.5}', "the label 1.5 is neither a class name"),
        ('{"path": "a/1.jpg", "label": -1}', "the label -1 is neither a class name"),
        ('{"path": "a/1.jpg", "label": null}', "the label null is neither a class name"),
        ('{"path": "a/1.jpg", "label": [["x"]]}', "is neither a class name"),
        ('{"path": "a/1.jpg", "label": ""}', "the label '' is empty"),
        ('{"path": "a/1.jpg", "label": []}', "no image has a label"),
        (
            '{"path": "a/1.jpg", "label": 1}\n{"path": "a/2.jpg", "label": "x"}',
            "names and numbers of classes are mixed",
        ),
        ('{"path": "a\\u0000/1.jpg", "label": 1}', "does not lead"),
    ],
)
def test_jsonl_files_that_are_refused(root: Path, content: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        opened(root, content, file="labels.jsonl")
    assert str(root.parent / "labels.jsonl") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "label", "message"),
    [
        ("", "cat", r"names\.txt: there should be one name"),
        ("cat\ncat\n", "cat", r"names\.txt: class 1, 'cat' is there twice"),
        ("cat\nd\x07g\n", "cat", r"names\.txt: class 1, .* cannot be written"),
        ("cat\ndog\n", "dgo", r"labels\.csv, line 2: .*names\.txt has no class 'dgo', did you mean 'dog'"),
        ("cat\ndog\n", "2", r"labels\.csv, line 2: the number 2 is not a class: .*names\.txt has 2, from 0 to 1"),
    ],
)
def test_class_names_that_do_not_fit(root: Path, names: str, label: str, message: str):
    (root.parent / "names.txt").write_text(names)
    with pytest.raises(UserError, match=message):
        opened(root, f"path,label\na/1.jpg,{label}\n", class_names=root.parent / "names.txt")


def test_lists_of_another_kind_absent_ones_and_sources_with_labels_of_their_own(root: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"must be a \.csv or \.jsonl file"):
        opened(root, "x", file="labels.txt")
    for name in ("none.csv", "none.jsonl"):
        with pytest.raises(UserError, match=rf"{name}: the file cannot be read \(No such file"):
            open_source(str(root), labels=LabelList(tmp_path / name))
    with pytest.raises(UserError, match="labels of their own"):
        open_source("digits", labels=LabelList(tmp_path / "x.csv"))


def test_the_fingerprint_sees_labels(root: Path):
    texts = [
        "a/1.jpg,x\na/2.jpg,y",
        "a/1.jpg,y\na/2.jpg,x",
        "a/1.jpg,x|y\na/2.jpg,y",
        "a/1.jpg,x\na/2.jpg,x|y",
        "a/1.jpg,x",
    ]
    assert len({opened(root, f"path,label\n{text}\n").fingerprint() for text in texts}) == len(texts)


# ---- VTAB's lists, and what is common to published sets


def task(root: Path) -> Path:
    """As the 1000-image splits are published, with fewer images."""
    labels = {"train800": [3, 0, 1, 1], "val200": [2, 0], "test": [1, 3, 3]}
    files: dict[str, bytes] = {}
    rows = {
        part: [f"images/{part}/{i:06d}.jpg {label}" for i, label in enumerate(numbers)]
        for part, numbers in labels.items()
    }
    for part, numbers in labels.items():
        files |= {f"images/{part}/{i:06d}.jpg": jpeg(100 * len(part) + i) for i in range(len(numbers))}
    rows["train800val200"] = rows["train800"] + rows["val200"]
    return write_files(
        root, {**files, **{f"{part}.txt": "\n".join([*each, ""]).encode() for part, each in rows.items()}}
    )


def found_in(source: Source, split: str) -> list[tuple[str, int]]:
    images = source.splits[split]  # type: ignore[index]
    return [(images.trace(i), int(images.labels[i])) for i in range(len(images))]


def stated(path: Path) -> list[tuple[str, int]]:
    return [(line.split()[0], int(line.split()[1])) for line in path.read_text().splitlines()]


def test_a_task(tmp_path: Path):
    root = task(tmp_path / "caltech101")
    source = published(root)
    assert source.classes == ("0", "1", "2", "3")
    assert list(source.splits) == ["train", "val"]
    assert found_in(source, "train") == stated(root / "train800val200.txt")
    assert found_in(source, "val") == stated(root / "test.txt")
    assert source.splits["val"].read(1) == (root / "images/test/000001.jpg").read_bytes()


def test_its_parts_for_choosing(tmp_path: Path):
    root = task(tmp_path)
    source = published(root / "train800.txt", val=root / "val200.txt")
    assert found_in(source, "train") == stated(root / "train800.txt")
    assert found_in(source, "val") == stated(root / "val200.txt")
    assert list(published(root / "train800.txt").splits) == ["train"]


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new, 1))

    return change


LAST = "images/test/000002.jpg 3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "test.txt").unlink(), r"test\.txt is missing"),
        (lambda root: (root / "test.txt").write_text(""), r"test\.txt: it names no image"),
        (replaced("test.txt", LAST, "images/test/000002.jpg"), r"test\.txt, line 3"),
        (replaced("test.txt", LAST, "images/test/000002.jpg cat"), r"test\.txt, line 3"),
        (replaced("test.txt", LAST, "images/test/000002.jpg -1"), r"test\.txt, line 3"),
        (replaced("test.txt", LAST, "images/test/000002.jpg 999999999"), r"test\.txt, line 3"),
        (replaced("test.txt", LAST, "../x.jpg 3"), r"test\.txt, line 3: .*inside"),
        (replaced("test.txt", LAST, "/etc/passwd 3"), r"test\.txt, line 3: .*inside"),
        (
            replaced("test.txt", LAST, "images/test/9.jpg 3"),
            r"test\.txt, line 3: images/test/9\.jpg is not a file below",
        ),
        (replaced("test.txt", LAST, "images/train800/000000.jpg 3"), r"line 1 of train800val200\.txt already"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, change: Callable[[Path], object], message: str):
    change(task(tmp_path))
    refused(tmp_path, message)


def test_lists_of_two_folders_and_an_option_of_other_lists(tmp_path: Path):
    one, two = task(tmp_path / "one"), task(tmp_path / "two")
    with pytest.raises(UserError, match="one folder"):
        published(one / "train800.txt", val=two / "val200.txt")
    with pytest.raises(UserError, match=r"^--val-labels:"):
        published(one / "train800.txt", val_labels=one)


def cifar(root: Path) -> Path:
    return write_tar(root / "cifar-10-python.tar.gz", cifar10())


def oxford(root: Path, files: tuple[dict[str, bytes], dict[str, bytes]]) -> Path:
    write_files(root, files[0])
    return write_files(root, files[1])


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (task, ("val", "val_labels", "cifar_labels")),
        (cifar, ("val", "val_labels")),
        (lambda root: oxford(root, pets()), ("val", "cifar_labels")),
        (lambda root: oxford(root, flowers()), ("val", "cifar_labels")),
    ],
)
def test_options_that_mean_nothing_to_a_published_set(
    tmp_path: Path, make: Callable[[Path], Path], flags: tuple[str, ...]
):
    path = make(tmp_path / "set")
    for name in flags:
        flag = {"cifar_labels": "--superclasses"}.get(name, f"--{name.replace('_', '-')}")
        with pytest.raises(UserError, match=f"^{flag}:"):
            published(path, **{name: "coarse" if name == "cifar_labels" else path})
